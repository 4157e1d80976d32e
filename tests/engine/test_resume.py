"""Going on from a log, and after preemption, is as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]


@pytest.mark.parametrize("done", [0, 1, 2, 5, 6, 11])
@pytest.mark.parametrize("min_tokens", [0, 9])
def test_resumed_at_any_token(bench: Make, request_of: Make, solo: Make, done: int, min_tokens: int) -> None:
    whole = request_of("a", 10, 12, seed=5, min_tokens=min_tokens, eos=frozenset())
    text = solo(whole)
    b = bench()
    b.engine.add(
        request_of("a", 10, 12, seed=5, min_tokens=min_tokens, eos=frozenset(), resumed=[text[:done]])
    )
    b.step()
    first = b.runner.plans[0].sequences[0]
    assert len(first.token_ids) == 10 + done
    assert first.sample.position == done
    assert list(first.sample.output_ids)[:done] == text[:done]
    assert first.sample.ban_stop_tokens is (done < min_tokens)
    b.drain()
    assert text[:done] + b.tokens["a", 0] == text
    assert b.finish["a", 0] == "length"


def test_a_log_that_lacks_only_its_finish_ends_without_a_token(bench: Make, request_of: Make) -> None:
    b = bench()
    b.engine.add(request_of("eos", 5, 9, resumed=[[1, 2, 7]]))
    b.engine.add(request_of("length", 5, 3, resumed=[[1, 2, 3]]))
    b.engine.add(request_of("stop", 5, 9, resumed=[[1, 8]], stop_token_ids=(8,)))
    outputs = b.engine.step()
    assert [(o.request_id, o.finish, o.stop_token) for o in outputs] == [
        ("eos", "stop", None),
        ("length", "length", None),
        ("stop", "stop", 8),
    ]
    assert b.runner.plans == []
    assert not b.engine.has_work


def test_a_stop_token_before_min_tokens_does_not_end_it(bench: Make, request_of: Make) -> None:
    b = bench()
    b.engine.add(request_of("a", 5, 9, resumed=[[1, 7]], min_tokens=4))
    b.drain()
    assert len(b.tokens["a", 0]) > 2


def test_choices_resume_each_from_its_own_log(bench: Make, request_of: Make, solo: Make) -> None:
    whole = request_of("a", 10, 12, n=4, eos=frozenset())
    texts = [solo(whole, c) for c in range(4)]
    b = bench(num_blocks=32)
    logs = [texts[0], texts[1][:4], [], texts[3][:11]]
    b.engine.add(request_of("a", 10, 12, n=4, eos=frozenset(), resumed=logs, finished=frozenset({0})))
    b.drain()
    assert ("a", 0) not in b.tokens
    assert [logs[c] + b.tokens["a", c] for c in (1, 2, 3)] == texts[1:]


def test_prompt_logprobs_are_not_repeated_after_a_takeover(bench: Make, request_of: Make) -> None:
    b = bench()
    b.engine.add(request_of("a", 10, 5, prompt_logprobs=1, eos=frozenset(), resumed=[[1]]))
    b.drain()
    assert b.first["a"].prompt_logprobs is None


def test_preempted_at_every_step(bench: Make, request_of: Make, solo: Make) -> None:
    b = bench(num_blocks=40, max_num_batched_tokens=64)
    requests = [request_of(f"r{i}", 6 + i, 14, min_tokens=5, n=1 + i % 2) for i in range(4)]
    for r in requests:
        b.engine.add(r)
    for turn in range(400):
        if not b.engine.has_work:
            break
        b.step()
        running = list(b.scheduler.roster.running)
        if running and turn % 2:
            b.scheduler.roster.preempt(running[turn % len(running)])
    for r in requests:
        for choice in range(r.params.n):
            assert b.tokens[r.request_id, choice] == solo(r, choice)
    assert len(set(b.runner.forgotten)) == 6  # each sequence, and again for each preemption
    assert len(b.runner.forgotten) > 12

"""Whole runs on the remembering runner: each output equals that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import HeadraceError
from worker.engine.plan import StepPlan

Make = Callable[..., Any]
NO_EOS = {"eos": frozenset()}


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(p.seq_id, p.start, len(p.token_ids)) for p in plan.sequences]


def tables(plan: StepPlan) -> list[list[int]]:
    return [list(p.block_table) for p in plan.sequences]


def test_a_prompt_is_chunked_and_decodes_come_first(bench: Make) -> None:
    b = bench(num_blocks=8, max_num_batched_tokens=8)
    b.add("a", 6, 4, **NO_EOS)
    first = b.scheduler.plan(0.0)
    assert chunks(first) == [(1, 0, 6)]
    assert tables(first) == [[0, 1]]
    b.scheduler.apply(first, b.runner.run(first), 0.0)
    b.add("b", 11, 4, **NO_EOS)
    second = b.scheduler.plan(0.0)
    assert chunks(second) == [(1, 6, 1), (2, 0, 7)]
    assert tables(second) == [[0, 1], [2, 3, 4]]
    b.scheduler.apply(second, b.runner.run(second), 0.0)
    third = b.scheduler.plan(0.0)
    assert chunks(third) == [(1, 7, 1), (2, 7, 4)]
    assert third.sequences[0].sample.position == 2
    assert third.sequences[1].sample.position == 0


def test_the_block_of_a_new_position_is_taken_when_it_is_needed(bench: Make) -> None:
    b = bench(num_blocks=8)
    b.add("a", 4, 8, **NO_EOS)
    used = []
    for _ in range(7):
        b.step()
        used.append(b.scheduler.pool.num_used)
    assert used == [1, 2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_crowd_equals_solo(bench: Make, request_of: Make, solo: Make, block_size: int, budget: int) -> None:
    b = bench(
        num_blocks=160 // block_size, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=5
    )
    requests = [request_of(f"r{i}", 3 + 4 * i, 9, n=1 + i % 3, min_tokens=i % 4) for i in range(9)]
    for r in requests:
        b.engine.add(r)
    b.drain()
    for r in requests:
        for choice in range(r.params.n):
            assert b.tokens[r.request_id, choice] == solo(r, choice)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 47, 48, 49])
def test_a_full_hit_computes_one_token_at_least(
    bench: Make, solo: Make, request_of: Make, length: int
) -> None:
    b = bench(num_blocks=32, block_size=16)
    for name in ("one", "two"):
        b.engine.add(request_of(name, range(length), 5, seed=3))
        b.drain()
    assert b.first["one"].cached_tokens == 0
    assert b.first["two"].cached_tokens == (length - 1) // 16 * 16
    assert b.tokens["one", 0] == b.tokens["two", 0] == solo(request_of("x", range(length), 5, seed=3))


def test_identical_prompts_in_one_step_hit_nothing_unpublished(
    bench: Make, solo: Make, request_of: Make
) -> None:
    b = bench(num_blocks=64, block_size=4, max_num_batched_tokens=256)
    requests = [request_of(f"r{i}", range(17), 6, seed=i) for i in range(8)]
    for r in requests:
        b.engine.add(r)
    b.drain()
    assert [b.tokens[r.request_id, 0] for r in requests] == [solo(r) for r in requests]
    shared = 17 // 4
    assert b.scheduler.kv.prefix.num_cached <= shared + 8 * 2  # one copy of the prompt, then each one's own


def test_forks_share_full_blocks_and_copy_the_partial_one(bench: Make, solo: Make, request_of: Make) -> None:
    b = bench(num_blocks=16, block_size=4)
    r = request_of("a", 10, 5, n=3, **NO_EOS)
    b.engine.add(r)
    b.step()
    assert chunks(b.runner.plans[0]) == [(1, 0, 10)]
    b.step()
    plan = b.runner.plans[1]
    assert chunks(plan) == [(1, 10, 1), (2, 9, 1), (3, 9, 1)]
    assert tables(plan) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert plan.block_copies == ((2, 3), (2, 4))
    b.drain()
    assert [b.tokens["a", c] for c in range(3)] == [solo(r, c) for c in range(3)]


def test_a_fork_at_a_block_border_copies_nothing(bench: Make) -> None:
    b = bench(num_blocks=16, block_size=4)
    b.add("a", 9, 3, n=2, **NO_EOS)
    b.step()
    b.step()
    assert b.runner.plans[1].block_copies == ()
    assert tables(b.runner.plans[1]) == [[0, 1, 2], [0, 1, 3]]


def test_more_choices_than_slots_run_in_turn(bench: Make, solo: Make, request_of: Make) -> None:
    b = bench(num_blocks=16, max_num_seqs=2)
    r = request_of("a", 10, 5, n=7)
    b.engine.add(r)
    b.drain()
    assert [b.tokens["a", c] for c in range(7)] == [solo(r, c) for c in range(7)]


def test_aborting_one_choice_leaves_the_others(bench: Make, solo: Make, request_of: Make) -> None:
    b = bench()
    r = request_of("a", 10, 12, n=3, **NO_EOS)
    b.engine.add(r)
    b.engine.abort("a", 0)  # the one that was to compute the prompt
    b.step()
    b.step()
    b.engine.abort("a", 1)
    b.drain()
    assert b.tokens["a", 2] == solo(r, 2)
    assert ("a", 0) not in b.tokens


def test_abort_of_a_request_frees_all_blocks_at_once(bench: Make) -> None:
    b = bench()
    b.add("a", 10, 50, n=4, **NO_EOS)
    for _ in range(3):
        b.step()
    b.engine.abort("a")
    b.engine.abort("a")
    b.engine.abort("never seen")
    assert b.scheduler.pool.num_used == 0
    b.step()
    assert not b.engine.has_work
    assert sorted(b.runner.forgotten) == [1, 2, 3, 4]


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_max_tokens_edges(bench: Make, max_tokens: int) -> None:
    b = bench()
    b.add("a", 10, max_tokens, **NO_EOS)
    b.drain()
    assert b.finish["a", 0] == "length"
    assert len(b.tokens.get(("a", 0), [])) == max_tokens


def test_max_tokens_is_bounded_by_the_context(bench: Make) -> None:
    b = bench(max_model_len=32)
    b.add("one", 31, 10, **NO_EOS)
    b.add("open", 20, None, **NO_EOS)
    b.drain()
    assert len(b.tokens["one", 0]) == 1
    assert len(b.tokens["open", 0]) == 12
    for length in (32, 33, 320):
        with pytest.raises(HeadraceError, match="context_length_exceeded"):
            b.add("long", length)


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt_token_ids"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": 1, "resumed": [[], [1]]}, "n"),
    ],
)
def test_what_is_refused(bench: Make, kwargs: dict[str, Any], field: str) -> None:
    b = bench()
    with pytest.raises(HeadraceError, match="invalid_request") as caught:
        b.add("a", **kwargs)
    assert caught.value.field == field
    assert not b.engine.has_work


def test_an_id_in_use_is_refused_and_free_after_abort(bench: Make) -> None:
    b = bench()
    b.add("a", 10, 30, **NO_EOS)
    with pytest.raises(HeadraceError, match="conflict"):
        b.add("a", 10, 30)
    b.step()
    b.engine.abort("a")
    b.add("a", 12, 3, **NO_EOS)
    b.tokens.clear()
    b.drain()
    assert len(b.tokens["a", 0]) == 3


def test_what_never_fits_is_refused_and_small_ones_are_served(bench: Make) -> None:
    b = bench(num_blocks=8, block_size=16, max_model_len=1024)
    with pytest.raises(HeadraceError, match="capacity"):
        b.add("big", 200, 10)
    with pytest.raises(HeadraceError, match="capacity"):
        b.add("long", 100, 100)
    b.add("full", 100, 29, **NO_EOS)  # 128 positions: the last token drawn needs none
    for i in range(5):
        b.add(f"small{i}", 10, 5, **NO_EOS)
    b.drain()
    assert len(b.tokens["full", 0]) == 29
    assert len(b.finish) == 6


def test_stop_tokens_and_min_tokens(bench: Make, solo: Make, request_of: Make) -> None:
    b = bench()
    plain = request_of("a", 10, 200)
    text = solo(plain)
    assert text[-1] == 7
    stop = text[3]
    cases = [
        (request_of("stop", plain.prompt_ids, 200, seed=plain.seed, stop_token_ids=(stop,)), "stop"),
        (request_of("min", plain.prompt_ids, 200, seed=plain.seed, min_tokens=len(text) + 5), "stop"),
        (request_of("ignore", plain.prompt_ids, 200, seed=plain.seed, ignore_eos=True), "length"),
        (request_of("exact", plain.prompt_ids, len(text), seed=plain.seed), "stop"),
    ]
    for r, _ in cases:
        b.engine.add(r)
    b.drain()
    for r, finish in cases:
        assert b.tokens[r.request_id, 0] == solo(r), r.request_id
        assert b.finish[r.request_id, 0] == finish


def test_deadlines_end_waiting_and_running_requests(bench: Make) -> None:
    b = bench(max_num_seqs=1)
    b.add("runs", 10, 1000 - 900, deadline_s=0.055, **NO_EOS)
    b.add("waits", 10, 5, deadline_s=0.025)
    b.add("free", 10, 5, **NO_EOS)
    for _ in range(3):
        b.step()
    assert b.errors == {}
    b.step()
    assert b.errors == {"waits": "deadline_exceeded"}
    b.drain()
    assert b.errors == {"waits": "deadline_exceeded", "runs": "deadline_exceeded"}
    assert len(b.tokens["runs", 0]) == 6
    assert b.finish["free", 0] == "length"
    assert ("waits", 0) not in b.tokens


def test_prompt_logprobs_come_once_and_skip_the_prefix_cache(bench: Make) -> None:
    b = bench(max_num_batched_tokens=4)
    prompt = list(range(11))
    b.add("warm", prompt, 2, **NO_EOS)
    b.drain()
    b.add("a", prompt, 3, n=2, prompt_logprobs=2, **NO_EOS)
    b.add("echo", prompt, 0, n=2, prompt_logprobs=0)
    b.drain()
    scores = b.first["a"].prompt_logprobs
    assert [s.token_id for s in scores] == prompt[1:]
    assert b.first["a"].cached_tokens == 0
    delivered = {(f.request_id, f.choice): f.prompt_logprobs for f in b.finished}
    assert [s.token_id for s in delivered["echo", 0]] == prompt[1:]
    assert delivered["echo", 1] is None


def test_in_flight_results_of_the_aborted_and_preempted_are_dropped(bench: Make) -> None:
    b = bench(num_blocks=16)
    b.add("a", 10, 20, **NO_EOS)
    b.add("b", 10, 20, **NO_EOS)
    plan = b.scheduler.plan(0.0)
    result = b.runner.run(plan)
    b.engine.abort("a")
    assert b.scheduler.pool.num_used == 3
    b.scheduler.apply(plan, result, 0.0)
    assert [o.request_id for o in b.scheduler.take_outputs()] == ["b"]
    assert b.engine.stats().dropped_results == 1
    b.scheduler.check_integrity()

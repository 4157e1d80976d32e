"""Guesses at the tokens to come: where they come from, when they pay, and that no answer changes by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages import SamplingParams
from worker.engine.budget import Limits, StepLoad
from worker.engine.drafts import FIRST_RATE, NGRAM, Draft, may_guess
from worker.engine.plan import StepPlan, StepResult
from worker.engine.request import Group, Request, Sequence
from worker.engine.scheduler import Scheduler

Make = Callable[..., Any]


def sequence(prompt: list[int], output: list[int]) -> Sequence:
    group = Group(Request("r", prompt, SamplingParams(), 0), 0.0, 0)
    return Sequence(1, group, 0, prompt, list(output), 1000)


def guess_by_search(tokens: list[int], count: int) -> list[int]:
    """What followed the last place where the last tokens stood, and so on with what that gives."""
    key = tokens[-NGRAM:]
    ends = [n for n in range(NGRAM, len(tokens)) if tokens[n - NGRAM : n] == key]
    if len(tokens) < NGRAM or not ends:
        return []
    known = list(tokens)
    for at in range(ends[-1], ends[-1] + count):
        known.append(known[at])
    return known[len(tokens) :]


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 2), max_size=30),
    count=st.integers(1, 7),
)
def test_guesses_follow_the_last_place_of_the_last_tokens(
    prompt: list[int], output: list[int], count: int
) -> None:
    """Asked for after each token, and once at the end: the same."""
    draft, seq = Draft(), sequence(prompt, [])
    for token in output:
        assert draft.guess(seq, count) == guess_by_search([*prompt, *seq.output_ids], count)
        seq.append(token)
    assert draft.guess(seq, count) == guess_by_search([*prompt, *output], count)
    assert Draft().guess(seq, count) == draft.guess(seq, count)


def test_what_repeats_itself_is_guessed_to_go_on() -> None:
    assert Draft().guess(sequence([9, 1, 2], [1, 2, 1, 2]), 5) == [1, 2, 1, 2, 1]


def test_sure_guesses_are_worth_rows_that_doubtful_ones_are_not() -> None:
    draft = Draft()
    assert draft.worth(0.9, 5) == 0
    assert draft.worth(FIRST_RATE, 5) == 1
    assert draft.worth(0.05, 5) == 5
    for _ in range(20):
        draft.judge(4, 4)
    assert draft.worth(0.9, 5) == 5
    for _ in range(20):
        draft.judge(4, 0)
    looks = 0
    while not draft.worth(0.3, 5):
        looks += 1
    assert 10 < looks < 100, "texts change: now and then a guess is tried again"


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"bad_words": ("x",)},
    ],
)
def test_penalties_are_never_guessed_at(params: dict[str, Any]) -> None:
    assert not may_guess(SamplingParams(**params))
    assert may_guess(SamplingParams(temperature=1.0, logprobs=2, logit_bias={3: 1.0}, min_tokens=4))


def drained(b: Any, request_of: Make, **requests: dict[str, Any]) -> dict[str, Request]:
    made = {name: request_of(name, **kw) for name, kw in requests.items()}
    for request in made.values():
        b.engine.add(request)
    b.drain()
    return made


def test_a_lone_answer_takes_fewer_steps(bench: Make, request_of: Make, solo: Make, repeating: Make) -> None:
    b = bench(draw=repeating, speculative_tokens=4)
    (request,) = drained(b, request_of, r={"prompt": 10, "max_tokens": 120, "eos": frozenset()}).values()
    assert b.tokens["r", 0] == solo(request, draw=repeating)
    stats = b.engine.stats()
    assert stats.generated_tokens == 120 == stats.step + stats.right_guesses
    assert stats.step < 80
    assert stats.guessed_tokens >= stats.right_guesses
    assert stats.computed_tokens == 10 + 119 + stats.guessed_tokens - stats.right_guesses


@pytest.mark.parametrize("max_tokens", range(1, 30))
def test_no_guess_goes_beyond_max_tokens(
    bench: Make, request_of: Make, solo: Make, repeating: Make, max_tokens: int
) -> None:
    b = bench(draw=repeating, speculative_tokens=7)
    request = drained(b, request_of, r={"prompt": [1, 2, 3, 1, 2, 3, 1], "max_tokens": max_tokens})["r"]
    assert b.tokens["r", 0] == solo(request, draw=repeating)
    size = b.scheduler.config.block_size
    most = 7 + max_tokens - 1
    assert all(p.start + len(p.token_ids) <= most for plan in b.runner.plans for p in plan.sequences)
    assert all(len(p.block_table) <= -(-most // size) for plan in b.runner.plans for p in plan.sequences)


def test_an_answer_ends_in_the_midst_of_right_guesses(bench: Make, request_of: Make, repeating: Make) -> None:
    """A stop token among them: what was computed behind it is forgotten."""
    b = bench(draw=repeating, speculative_tokens=4)
    request = request_of("r", max_tokens=200, eos=frozenset())
    b.engine.add(request)
    b.drain()
    told = b.tokens["r", 0]
    places = [(step, o) for step, o in enumerate(told) if told.count(o) > 1]
    for _, stop in places[:12]:
        again = bench(draw=repeating, speculative_tokens=4)
        again.engine.add(
            request_of("r", max_tokens=200, eos=frozenset(), stop_token_ids=(stop,), min_tokens=20)
        )
        again.drain()
        end = told.index(stop, 20) if stop in told[20:] else len(told) - 1
        assert again.tokens["r", 0] == told[: end + 1]


def test_guesses_take_no_block_from_others(
    bench: Make, request_of: Make, solo: Make, repeating: Make
) -> None:
    """In a pool that is short nobody is preempted more often than without them."""
    preemptions = []
    for guesses in (0, 6):
        b = bench(draw=repeating, num_blocks=30, speculative_tokens=guesses)
        made = drained(b, request_of, **{f"r{i}": {"prompt": 9, "max_tokens": 40} for i in range(8)})
        for name, request in made.items():
            assert b.tokens[name, 0] == solo(request, draw=repeating)
        preemptions.append(b.engine.stats().preemptions)
    assert preemptions[1] <= preemptions[0] + 2


class Told:
    """A budget that says what a step costs beside its tokens."""

    def __init__(self, fixed_tokens: float) -> None:
        self._limits = Limits(64, 8, 64, fixed_tokens)

    def limits(self) -> Limits:
        return self._limits

    def observe(self, load: StepLoad, duration_s: float) -> None: ...

    def explain(self) -> str:
        return ""


@pytest.mark.parametrize(("fixed_tokens", "guesses"), [(0.0, False), (0.5, False), (50.0, True)])
def test_a_full_batch_guesses_only_where_rows_are_cheap(
    bench: Make, request_of: Make, repeating: Make, fixed_tokens: float, guesses: bool
) -> None:
    b = bench(draw=repeating, speculative_tokens=4, num_blocks=400)
    b.scheduler = b.engine.scheduler = Scheduler(b.scheduler.config, Told(fixed_tokens))
    drained(b, request_of, **{f"r{i}": {"prompt": 9, "max_tokens": 60} for i in range(8)})
    first = [p.num_guesses for plan in b.runner.plans[:12] for p in plan.sequences]
    assert any(first) == guesses


def test_guesses_that_spoil_blocks_end_with_them(
    bench: Make, request_of: Make, solo: Make, repeating: Make
) -> None:
    """What was computed of the sequence is not used again; it goes on from its tokens, without guesses."""
    b = bench(draw=repeating, speculative_tokens=4)
    run, spoilt = b.runner.run, []

    def spoil(plan: StepPlan) -> StepResult:
        result = run(plan)
        guessing = [p.seq_id for p in plan.sequences if p.num_guesses]
        if guessing and not spoilt:
            spoilt.extend(guessing)
            for part in plan.sequences:
                for block in part.block_table:
                    b.runner.cells[block] = [None] * b.runner.block_size
            b.scheduler.kv.prefix.enabled = False
        return replace(result, spoilt=frozenset(spoilt) & set(guessing))

    b.runner.run = spoil
    request = drained(b, request_of, r={"prompt": 10, "max_tokens": 60, "eos": frozenset()})["r"]
    assert spoilt
    assert b.tokens["r", 0] == solo(request, draw=repeating)
    after = [plan for plan in b.runner.plans if any(p.num_guesses for p in plan.sequences)]
    assert len(after) == 1


def test_choices_and_scored_prompts(bench: Make, request_of: Make, solo: Make, repeating: Make) -> None:
    b = bench(draw=repeating, speculative_tokens=4)
    request = drained(
        b, request_of, r={"prompt": 10, "max_tokens": 50, "n": 3, "prompt_logprobs": 1, "logprobs": 1}
    )["r"]
    for choice in range(3):
        assert b.tokens["r", choice] == partial(solo, draw=repeating)(request, choice)
    assert b.engine.stats().right_guesses > 0

"""One bad sequence fails alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import HeadraceError
from worker.engine.isolation import run_isolated
from worker.engine.plan import ScoredToken, SequencePlan, StepPlan, StepResult

Make = Callable[..., Any]
BAD = 49


def parts(count: int) -> tuple[SequencePlan, ...]:
    return tuple(SequencePlan(i, [i], 0, [i], None) for i in range(count))


class Faulty:
    """Raises for whole plans that hold a bad sequence."""

    def __init__(self, bad: set[int], error: Exception | None = None) -> None:
        self.bad = bad
        self.error = error or ZeroDivisionError()
        self.runs = 0
        self.copies: list[tuple[tuple[int, int], ...]] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.runs += 1
        self.copies.append(plan.block_copies)
        if any(p.seq_id in self.bad for p in plan.sequences):
            raise self.error
        return StepResult({p.seq_id: ScoredToken(p.seq_id, 0.0) for p in plan.sequences})


@pytest.mark.parametrize("bad", [{0}, {5}, {31}, {3, 4}, set(range(0, 32, 2)), set(range(32))])
def test_culprits_fail_and_all_others_have_results(bad: set[int]) -> None:
    runner = Faulty(bad)
    result = run_isolated(runner.run, StepPlan(0, parts(32)))
    assert set(result.failed) == bad
    assert set(result.sampled) == set(range(32)) - bad
    assert {e.code for e in result.failed.values()} == {"internal"}
    assert isinstance(result.failed[min(bad)].__cause__, ZeroDivisionError)
    assert runner.runs <= 64


def test_a_dead_device_is_given_up_after_a_bounded_number_of_runs() -> None:
    runner = Faulty(set(range(1000)))
    result = run_isolated(runner.run, StepPlan(0, parts(1000)))
    assert len(result.failed) == 1000
    assert runner.runs <= 100


def test_an_error_with_a_code_keeps_it() -> None:
    runner = Faulty({1}, HeadraceError("grammar"))
    assert run_isolated(runner.run, StepPlan(0, parts(2))).failed[1].code == "grammar"


def test_copies_go_with_the_sequence_that_needs_them() -> None:
    runner = Faulty({0})
    run_isolated(runner.run, StepPlan(0, parts(2), ((7, 0), (8, 1))))
    assert runner.copies == [((7, 0), (8, 1)), ((7, 0),), ((8, 1),)]


def test_what_is_no_exception_is_not_held_up() -> None:
    runner = Faulty({0}, None)
    runner.error = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        run_isolated(runner.run, StepPlan(0, parts(2)))


def test_neighbours_of_a_failing_request_are_unchanged(bench: Make, request_of: Make, solo: Make) -> None:
    b = bench()
    sane = b.runner.run

    def run(plan: StepPlan) -> StepResult:
        if any(BAD in p.token_ids for p in plan.sequences):
            raise RuntimeError("bad token")
        return sane(plan)

    b.runner.run = run
    requests = [request_of(f"r{i}", [i + 1, 2, 3], 12, n=1 + i % 2, stop_token_ids=(BAD,)) for i in range(6)]
    for r in requests:
        b.engine.add(r)
    b.engine.add(request_of("bad", [1, 2, BAD], 12, n=2))
    b.drain()
    assert b.errors == {"bad": "internal"}
    for r in requests:
        for choice in range(r.params.n):
            assert b.tokens[r.request_id, choice] == solo(r, choice)


def test_a_failed_sequence_ends_its_whole_request(bench: Make) -> None:
    b = bench()
    sane, b.runner.run = b.runner.run, None
    b.add("a", 9, 12, n=3, eos=frozenset())
    b.add("b", 9, 4, eos=frozenset())
    steps = []

    def run(plan: StepPlan) -> StepResult:
        steps.append(plan)
        result = sane(plan)
        failed = {2: HeadraceError("non_finite")} if len(steps) == 4 else {}
        return StepResult(result.sampled, failed, {})

    b.runner.run = run
    b.drain()
    assert b.errors == {"a": "non_finite"}
    assert b.finish == {("b", 0): "length"}
    assert b.engine.stats().failed_requests == 1


def test_a_missing_token_is_a_failure_not_a_hang(bench: Make) -> None:
    b = bench()
    b.runner.run = lambda plan: StepResult({})
    b.add("a", 9, 12)
    b.step()
    assert b.errors == {"a": "internal"}
    b.drain()

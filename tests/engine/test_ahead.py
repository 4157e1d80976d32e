"""Steps planned and launched while the one before them is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import HeadraceError
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.plan import StepPlan, StepResult
from worker.engine.scheduler import Scheduler

Make = Callable[..., Any]
HOST = {  # parameters of draws that need the host
    "penalty": {"frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.1},
    "bad words": {"bad_words": ("no",)},
    "bias": {"logit_bias": {3: 1.0}},
    "log-probabilities": {"logprobs": 0},
    "prompt log-probabilities": {"prompt_logprobs": 0},
    "min_tokens": {"min_tokens": 100},
}


@pytest.fixture(params=[False, True], ids=["late", "eager"])
def ahead(bench: Make, request: Any) -> Make:
    """An engine that plans ahead; its device computes launched steps at once, or when somebody waits."""

    def make(**config: Any) -> Any:
        b = bench(plan_ahead=True, **config)
        b.runner.eager = request.param
        return b

    return make


def pendings(plan: StepPlan) -> int:
    return sum(part.pending for part in plan.sequences)


def in_flight(b: Any) -> int:
    return len(b.engine._steps)


def test_each_step_is_launched_before_the_one_before_it_is_waited_for(bench: Make) -> None:
    b = bench(plan_ahead=True)
    order: list[tuple[str, int]] = []
    launch = b.runner.launch

    def noted(plan: StepPlan) -> Any:
        order.append(("launch", plan.step))
        launched = launch(plan)
        result = launched.result

        def wait() -> StepResult:
            order.append(("wait", plan.step))
            return result()  # type: ignore[no-any-return]

        launched.result = wait
        return launched

    b.runner.launch = noted
    b.add("a", 6, 4, eos=frozenset())
    b.drain()
    assert order == [
        ("launch", 0), ("launch", 1), ("wait", 0), ("launch", 2),
        ("wait", 1), ("launch", 3), ("wait", 2), ("wait", 3),
    ]  # fmt: skip
    assert [pendings(plan) for plan in b.runner.plans] == [0, 1, 1, 1]


def test_the_same_tokens_in_as_many_steps(ahead: Make, request_of: Make, solo: Make) -> None:
    b = ahead()
    requests = [request_of(f"r{i}", 3 + 5 * i, 30, n=1 + i % 2) for i in range(5)]
    for r in requests:
        b.engine.add(r)
    b.drain()
    for r in requests:
        for choice in range(r.params.n):
            assert b.tokens[r.request_id, choice] == solo(r, choice)
    assert b.engine.stats().step == len(b.runner.plans)


def test_a_stop_drops_the_step_behind_it(ahead: Make, request_of: Make, solo: Make) -> None:
    """The token behind the last one was computed, in a block that nobody finds and that is free again."""
    b = ahead(num_blocks=12)
    r = next(r for i in range(200) if 3 < len(solo(r := request_of(f"r{i}", 6, 40))) < 20)
    b.engine.add(r)
    b.drain()
    want = solo(r)
    assert b.tokens[r.request_id, 0] == want
    assert b.engine.stats().dropped_results == 1
    assert len(b.runner.plans) == len(want) + 1
    computed = 6 + len(want) - 1
    assert b.engine.stats().cached_blocks == computed // 4


def test_nothing_is_computed_behind_the_last_token(ahead: Make) -> None:
    b = ahead()
    b.add("a", 6, 5, eos=frozenset())
    b.drain()
    assert len(b.runner.plans) == 5
    assert b.engine.stats().dropped_results == 0


@pytest.mark.parametrize("name", HOST)
def test_beside_a_draw_that_needs_the_host_nothing_is_ahead(ahead: Make, name: str) -> None:
    """And both go on with a token each in every step, as they would without."""
    b = ahead()
    b.add("plain", 6, 20, eos=frozenset())
    b.add("other", 6, 6, eos=frozenset(), **HOST[name])
    b.step()
    for _ in range(4):
        b.step()
        if name == "prompt log-probabilities":
            break  # they are delivered with the first token: from then on it is as any other
        assert in_flight(b) == 0
    while ("other", 0) not in b.finish:
        b.step()
    b.drain()
    plans = b.runner.plans
    both = [plan for plan in plans if len(plan.sequences) == 2]
    assert len(both) == 6
    assert len(plans) == 20
    assert pendings(plans[-1]) == 1


def test_min_tokens_once_reached_holds_up_nobody(ahead: Make, request_of: Make, solo: Make) -> None:
    b = ahead()
    r = request_of("a", 6, 20, min_tokens=4)
    b.engine.add(r)
    b.drain()
    assert b.tokens["a", 0] == solo(r)
    assert [pendings(plan) for plan in b.runner.plans][:6] == [0, 0, 0, 0, 0, 1]


def test_nobody_is_preempted_for_a_token_that_may_be_the_last(ahead: Make) -> None:
    """Two prompts that fill their blocks, and one block left: the second waits until its token is known."""
    b = ahead(num_blocks=5, prefix_cache=False)
    for name in "ab":
        b.add(name, 8, 8, eos=frozenset())
    b.step()
    assert in_flight(b) == 1
    assert b.engine.stats().preemptions == 0
    b.drain()
    assert [len(plan.sequences) for plan in b.runner.plans[:2]] == [2, 1]
    assert all(len(tokens) == 8 for tokens in b.tokens.values())


def test_who_waits_for_blocks_starts_once_they_are_free(ahead: Make) -> None:
    """A step that plans nothing ahead and applies the last one is progress for whoever watches the number."""
    b = ahead(num_blocks=4)
    b.add("a", 10, 3, eos=frozenset())
    b.add("b", 10, 3, eos=frozenset())
    steps = [b.engine.stats().step]
    while b.engine.has_work:
        b.step()
        steps.append(b.engine.stats().step)
    assert steps == list(range(len(steps)))
    assert b.order == ["a", "b"]


def test_an_abort_with_a_step_in_flight(ahead: Make, request_of: Make, solo: Make) -> None:
    b = ahead()
    b.add("a", 6, 20, eos=frozenset())
    other = request_of("b", 6, 20)
    b.engine.add(other)
    b.step()
    assert in_flight(b) == 1
    b.engine.abort("a")
    b.drain()
    assert b.tokens["b", 0] == solo(other)
    assert ("a", 0) not in b.finish


def test_there_is_work_until_the_last_step_is_over(ahead: Make) -> None:
    b = ahead()
    b.add("a", 6, 20, eos=frozenset())
    b.step()
    b.engine.abort("a")
    assert b.step() == []
    assert not b.engine.has_work
    assert in_flight(b) == 0
    assert b.runner.forgotten


def test_a_request_that_comes_meanwhile_is_in_the_next_plan(ahead: Make) -> None:
    b = ahead()
    b.add("a", 6, 20, eos=frozenset())
    b.step()
    b.add("b", 6, 20)
    b.step()
    b.step()
    assert [len(plan.sequences) for plan in b.runner.plans][:3] == [1, 1, 2]


def test_a_deadline_passes_with_a_step_in_flight(ahead: Make) -> None:
    b = ahead()
    b.add("a", 6, 20, deadline_s=0.015)
    b.drain()
    assert b.errors == {"a": "deadline_exceeded"}
    assert len(b.tokens["a", 0]) == 2


def test_preempted_and_planned_again_in_the_same_step(ahead: Make, request_of: Make, solo: Make) -> None:
    """The runner is told to forget in the order of launches, or a chunk would start elsewhere."""
    b = ahead(num_blocks=9, max_num_seqs=4)
    requests = [request_of(f"r{i}", 9, 16, eos=frozenset()) for i in range(4)]
    for r in requests:
        b.engine.add(r)
    for turn in range(60):
        if turn % 3 == 1 and len(b.scheduler.roster.running):
            b.scheduler.roster.preempt(b.scheduler.roster.running[0])
        b.step()
    b.drain()
    for r in requests:
        assert b.tokens[r.request_id, 0] == solo(r)


@pytest.mark.parametrize("where", ["launch", "before", "after"])
@pytest.mark.parametrize("seed", range(8))
def test_steps_that_fail_once_are_computed_again(
    ahead: Make, request_of: Make, solo: Make, where: str, seed: int
) -> None:
    """Also the one launched behind, whose tokens were drawn behind what was not there."""
    rng = random.Random(seed)
    b = ahead(num_blocks=40)
    launch = b.runner.launch

    compute = b.runner.compute
    doomed: set[int] = set()

    def launch_or_fail(plan: StepPlan) -> Any:
        if rng.random() < 0.2:
            if where == "launch":
                raise RuntimeError("out of memory")
            doomed.add(plan.step)
        return launch(plan)

    def compute_or_fail(plan: StepPlan) -> StepResult:
        done = where == "after" and compute(plan)
        if plan.step in doomed:
            doomed.discard(plan.step)
            raise RuntimeError("the step was lost")
        return done or compute(plan)  # type: ignore[no-any-return]

    b.runner.launch, b.runner.compute = launch_or_fail, compute_or_fail
    b.runner.strict = False
    requests = [request_of(f"r{i}", 5 + i, 12, n=1 + i % 2) for i in range(10)]
    aborted = set()
    for r in requests:
        b.engine.add(r)
    while b.engine.has_work:
        b.step()
        if rng.random() < 0.1:
            aborted.add(name := f"r{rng.randrange(10)}")
            b.engine.abort(name)
        elif rng.random() < 0.1 and len(b.scheduler.roster.running):
            b.scheduler.roster.preempt(b.scheduler.roster.running[0])
    assert b.errors == {}
    for r in requests:
        for choice in range(r.params.n):
            want, got = solo(r, choice), b.tokens.get((r.request_id, choice), [])
            assert got == (want[: len(got)] if r.request_id in aborted else want)


def test_a_culprit_fails_alone(ahead: Make, request_of: Make, solo: Make) -> None:
    bad = 49
    b = ahead()
    compute = b.runner.compute

    def compute_or_fail(plan: StepPlan) -> StepResult:
        if any(bad in part.token_ids for part in plan.sequences):
            raise HeadraceError("non_finite")
        return compute(plan)  # type: ignore[no-any-return]

    b.runner.compute = compute_or_fail
    b.runner.strict = False
    b.add("bad", [1, 2, bad], 12)
    requests = [request_of(f"r{i}", [i + 1, 2, 3], 12, stop_token_ids=(bad,)) for i in range(5)]
    for r in requests:
        b.engine.add(r)
    b.drain()
    assert b.errors == {"bad": "non_finite"}
    for r in requests:
        assert b.tokens[r.request_id, 0] == solo(r)


def test_a_step_counts_from_its_launch_or_the_end_of_the_one_before(bench: Make) -> None:
    b = bench(plan_ahead=True)
    seen: list[float] = []
    b.scheduler.budget.observe = lambda load, duration_s: seen.append(duration_s)
    compute = b.runner.compute

    def slow(plan: StepPlan) -> StepResult:
        b.clock.now += 1.0
        return compute(plan)  # type: ignore[no-any-return]

    b.runner.compute, b.runner.eager = slow, False
    b.add("a", 6, 4, eos=frozenset())
    while b.engine.has_work:
        b.engine.step()
    assert seen == [1.0, 1.0, 1.0, 1.0]


def test_a_runner_that_cannot_launch_is_refused(quick_runner: Any) -> None:
    scheduler = Scheduler(EngineConfig(num_blocks=8, plan_ahead=True))
    with pytest.raises(TypeError, match="QuickRunner has no `launch`"):
        Engine(scheduler, quick_runner, lambda: 0.0)


def test_guesses_and_planning_ahead_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="speculative_tokens=2"):
        EngineConfig(num_blocks=8, plan_ahead=True, speculative_tokens=2)

"""Who goes first, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.policy import POLICIES, rank

Make = Callable[..., Any]
NO_EOS: dict[str, Any] = {"eos": frozenset()}


def test_order_within_a_class(bench: Make) -> None:
    jobs = {"long": (40, None), "urgent": (30, 2.0), "short": (6, 20.0)}
    orders = {}
    for policy in POLICIES:
        b = bench(max_num_seqs=1, policy=policy, max_num_batched_tokens=64)
        for name, (prompt, deadline_s) in jobs.items():
            b.add(name, prompt, 3, deadline_s=deadline_s, **NO_EOS)
        b.drain()
        orders[policy] = b.order
    assert orders == {
        "fcfs": ["long", "urgent", "short"],
        "shortest-first": ["short", "urgent", "long"],
        "deadline": ["urgent", "short", "long"],
    }


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.one_of(st.none(), st.floats(0, 1000)),
    st.floats(0.01, 1000),
)
def test_nobody_is_passed_by_those_who_come_after_the_bound(
    policy: str, mine: int, other: int, prompt: int, tokens: int, deadline_s: float | None, late_s: float
) -> None:
    """The bound of policy.py: ageing_s * (class rank + 1) after its arrival nobody new ranks before it."""
    from headrace.messages import SamplingParams
    from worker.engine.request import Request

    ageing_s = 30.0
    waits = Request("w", [1] * prompt, SamplingParams(max_tokens=tokens), 0, mine, 5.0, deadline_s)
    arrival_s = 5.0 + ageing_s * (mine + 1) + late_s
    comes = Request("c", [1], SamplingParams(max_tokens=1), 0, other, arrival_s, arrival_s)
    assert rank(waits, policy, ageing_s) < rank(comes, policy, ageing_s)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_low_long_job_starts_within_the_bound_at_saturation(bench: Make, policy: str) -> None:
    b = bench(max_num_seqs=2, ageing_s=1.0, policy=policy, num_blocks=500, max_model_len=2000)
    b.add("keeps busy", 5, 30, **NO_EOS)
    b.add("poor", 1500, 3, priority=2, **NO_EOS)
    count = 0
    while b.engine.stats().running < 2 or not _runs(b, "poor"):
        while b.engine.stats().waiting < 6:
            b.add(f"rich{count}", 5, 4, priority=0, **NO_EOS)
            count += 1
        b.step(check=False)
        assert b.clock.now < 3 * 1.0 + 1.0  # ageing_s * (class rank + 1), and the job in front


def _runs(b: Any, name: str) -> bool:
    return any(s.group.request.request_id == name for s in b.scheduler.roster.running)


def test_a_higher_class_takes_a_slot_from_a_lower_one(bench: Make, request_of: Make, solo: Make) -> None:
    b = bench(max_num_seqs=2)
    low = request_of("low", 8, 20, priority=2, **NO_EOS)
    for r in (low, request_of("normal", 8, 20, priority=1, **NO_EOS)):
        b.engine.add(r)
    b.step()
    b.clock.now = 0.5
    b.add("high", 8, 3, priority=0, **NO_EOS)
    b.add("also normal", 8, 3, priority=1, **NO_EOS)
    b.step()
    assert sorted(s.group.request.request_id for s in b.scheduler.roster.running) == ["high", "normal"]
    assert b.engine.stats().preemptions == 1
    b.drain()
    assert b.tokens["low", 0] == solo(low)
    assert b.order.index("high") < b.order.index("also normal")


def test_who_is_kept_behind_a_higher_class_is_named_and_only_then(bench: Make) -> None:
    b = bench(max_num_seqs=2, num_blocks=200, max_model_len=400)
    for name in ("low", "low too"):
        b.add(name, 8, 200, priority=2, **NO_EOS)
    b.step()
    b.add("short", 8, 3, priority=0, **NO_EOS)
    b.add("normal", 8, 20, priority=1, **NO_EOS)
    while b.engine.stats().running != 2 or not _runs(b, "low"):
        b.step()
        assert not b.engine.displaced()  # not for so short a while, and not behind one of their own class
    while b.engine.stats().waiting:
        b.step()
        assert not b.engine.displaced()
    b.add("high", 8, 150, priority=0, **NO_EOS)
    b.add("high too", 8, 150, priority=0, **NO_EOS)
    steps = 0
    while not b.engine.displaced():
        b.step()
        steps += 1
    assert 64 <= steps < 80
    assert b.engine.displaced() == ("low", "low too")
    for name in b.engine.displaced():
        b.engine.abort(name)
    b.step()
    assert b.engine.displaced() == ()


def test_a_higher_class_takes_tokens_of_a_step_that_lower_ones_fill(bench: Make) -> None:
    b = bench(max_num_seqs=8, max_num_batched_tokens=4)
    for i in range(4):
        b.add(f"low{i}", 1, 50, priority=2, **NO_EOS)
    b.step()
    b.add("high", 8, 2, priority=0, **NO_EOS)
    b.step()
    assert _runs(b, "high")
    for _ in range(12):
        b.step()
    assert b.finish["high", 0] == "length"
    b.drain()


def test_a_higher_class_goes_before_the_chunks_of_lower_ones(bench: Make) -> None:
    b = bench(max_num_batched_tokens=32, num_blocks=200)
    for i in range(4):
        b.add(f"low{i}", 30, 2, priority=2, **NO_EOS)
    b.step()
    b.add("high", 20, 2, priority=0, **NO_EOS)
    b.step()
    assert "high" in b.first
    assert b.runner.plans[-1].num_tokens == 32
    assert b.engine.stats().preemptions == 0
    b.drain()


def test_a_higher_class_takes_blocks_from_lower_ones_only(bench: Make) -> None:
    b = bench(num_blocks=20, block_size=4, max_num_seqs=8, max_num_batched_tokens=128)
    b.add("high1", 20, 10, priority=0, **NO_EOS)
    b.add("low1", 20, 10, priority=2, **NO_EOS)
    b.step()
    b.add("high2", 48, 4, priority=0, **NO_EOS)
    b.step()
    assert sorted(s.group.request.request_id for s in b.scheduler.roster.running) == ["high1", "high2"]
    b.add("high3", 48, 4, priority=0, **NO_EOS)
    b.step()
    assert not _runs(b, "high3")
    b.drain()


def test_equals_are_not_preempted_for_slots(bench: Make) -> None:
    b = bench(max_num_seqs=1)
    b.add("a", 8, 10, **NO_EOS)
    b.step()
    b.add("b", 8, 10, **NO_EOS)
    b.drain()
    assert b.engine.stats().preemptions == 0


def test_random_priorities_under_pressure(bench: Make, request_of: Make, solo: Make) -> None:
    rng = random.Random(11)
    b = bench(num_blocks=20, block_size=4, max_num_seqs=5, max_num_batched_tokens=24, ageing_s=0.5)
    requests = []
    for i in range(200):
        r = request_of(
            f"r{i}", rng.randint(1, 20), rng.randint(1, 25), priority=rng.randrange(3), arrival_s=b.clock.now
        )
        requests.append(r)
        b.engine.add(r)
        for _ in range(rng.randrange(4)):
            b.step()
    b.drain()
    assert b.engine.stats().preemptions > 50
    most = max(b.scheduler.config.max_preemptions, 3)
    assert b.engine.stats().preemptions <= 200 * (most + 1)
    assert all(b.tokens[r.request_id, 0] == solo(r) for r in requests)

"""Too few blocks, slots or tokens: all get on, nobody starves, little is computed twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]
NO_EOS: dict[str, Any] = {"eos": frozenset()}


def test_long_jobs_in_little_more_than_one_jobs_memory(bench: Make, request_of: Make, solo: Make) -> None:
    b = bench(num_blocks=33, block_size=4, max_num_seqs=20, max_num_batched_tokens=32)  # one job takes 28
    requests = [request_of(f"r{i}", 12, 100, **NO_EOS) for i in range(20)]
    for r in requests:
        b.engine.add(r)
    steps = b.drain()
    assert steps <= 3 * 20 * 100 / 1.2
    assert steps <= 20 * 101  # not worse than one after the other
    assert b.engine.stats().preemptions <= 20 * 4
    for r in requests:
        assert b.tokens[r.request_id, 0] == solo(r)


def test_each_is_preempted_yet_ends_as_if_alone(bench: Make, request_of: Make, solo: Make) -> None:
    b = bench(num_blocks=20, block_size=4, max_num_seqs=6, max_num_batched_tokens=32)
    requests = [request_of(f"r{i}", 8, 60, min_tokens=40, n=1 + i % 2) for i in range(6)]
    for r in requests:
        b.engine.add(r)
    b.drain()
    assert b.engine.stats().preemptions >= 6
    for r in requests:
        for choice in range(r.params.n):
            assert b.tokens[r.request_id, choice] == solo(r, choice)


def test_preempted_requests_keep_their_place(bench: Make) -> None:
    b = bench(num_blocks=16, block_size=4, max_num_seqs=3, max_num_batched_tokens=64)
    for name in ("a", "b", "c", "d"):
        b.add(name, 12, 30, **NO_EOS)
    ended = []
    while b.engine.has_work:
        ended += [o.request_id for o in b.step() if o.finish]
    assert b.engine.stats().preemptions >= 1
    assert ended == ["a", "b", "c", "d"]


def test_a_burst_of_prompts_of_which_only_one_fits(bench: Make) -> None:
    b = bench(num_blocks=100, block_size=4, max_model_len=512, max_num_batched_tokens=128)
    for i in range(50):
        b.add(f"r{i}", 240, 10, **NO_EOS)
    steps = b.drain()
    ideal = 50 * 11  # two chunks, the second of which gives the first of ten tokens
    assert steps <= ideal / 0.7
    assert b.engine.stats().preemptions == 0


def test_blocks_are_used_when_they_are_the_limit(bench: Make, quick_runner: Any) -> None:
    rng = random.Random(3)
    b = bench(quick_runner, num_blocks=250, block_size=16, max_num_seqs=64, max_num_batched_tokens=256)
    for i in range(200):
        b.add(f"r{i}", rng.randint(50, 130), rng.randint(20, 80), **NO_EOS)
    used = []
    while b.engine.stats().waiting:
        b.step(check=False)
        used.append(b.engine.stats().kv_utilisation)
    settled = used[len(used) // 10 :]
    assert sum(settled) / len(settled) >= 0.96
    assert b.engine.stats().preemptions <= 30


def test_slots_are_used_when_they_are_the_limit(bench: Make, quick_runner: Any) -> None:
    rng = random.Random(3)
    b = bench(quick_runner, num_blocks=2000, block_size=16, max_num_seqs=32, max_num_batched_tokens=256)
    for i in range(200):
        b.add(f"r{i}", rng.randint(50, 130), rng.randint(20, 80), **NO_EOS)
    slots = []
    while b.engine.stats().waiting:
        b.step(check=False)
        slots.append(b.engine.stats().slots_used / 32)
    settled = slots[len(slots) // 10 :]
    assert sum(settled) / len(settled) >= 0.95


def test_a_budget_smaller_than_the_decoding_sequences_rotates(
    bench: Make, request_of: Make, solo: Make
) -> None:
    b = bench(num_blocks=400, max_num_seqs=17, max_num_batched_tokens=17, max_model_len=1024)
    requests = [request_of(f"r{i}", 3, 60, **NO_EOS) for i in range(16)]
    requests.append(request_of("long", 500, 5, **NO_EOS))
    for r in requests:
        b.engine.add(r)
    while b.engine.stats().running < 17:
        b.step()
    b.scheduler.budget._limits = type(b.scheduler.budget.limits())(8, 17, 8)  # less than what runs
    waits = {s.seq_id: 0 for s in b.scheduler.roster.running}
    while len(b.finish) == 0:
        b.step()
        served = {p.seq_id for p in b.runner.plans[-1].sequences}
        waits = {seq_id: 0 if seq_id in served else n + 1 for seq_id, n in waits.items()}
        assert max(waits.values()) <= 3
    b.drain()
    assert all(b.tokens[r.request_id, 0] == solo(r) for r in requests)


@pytest.mark.parametrize("budget", [1, 2])
def test_the_smallest_budgets(bench: Make, budget: int) -> None:
    b = bench(max_num_batched_tokens=budget, max_num_seqs=4)
    for i in range(6):
        b.add(f"r{i}", 7, 6, **NO_EOS)
    assert b.drain() <= (6 * 12) / budget + 12
    assert len(b.finish) == 6


def test_a_long_prompt_never_stops_decodes_nor_short_prompts(bench: Make) -> None:
    b = bench(num_blocks=1200, max_model_len=5000, max_num_batched_tokens=64, max_num_seqs=16)
    for i in range(4):
        b.add(f"d{i}", 5, 200, **NO_EOS)
    b.step()
    b.step()
    b.add("long", 4000, 3, **NO_EOS)
    counts = {f"d{i}": len(b.tokens[f"d{i}", 0]) for i in range(4)}
    for turn in range(100):
        if turn == 10:
            b.add("short", 20, 3, **NO_EOS)
        outputs = {o.request_id for o in b.step()}
        assert {f"d{i}" for i in range(4)} <= outputs
    assert all(len(b.tokens[name, 0]) == count + 100 for name, count in counts.items())
    assert b.finish["short", 0] == "length"  # within its few steps, long before the long prompt is through
    assert "long" in b.first
    assert b.order.index("short") < b.order.index("long")


@pytest.mark.parametrize("most", [3, 10])
def test_a_big_one_is_passed_a_bounded_number_of_times(bench: Make, most: int) -> None:
    b = bench(num_blocks=40, block_size=4, max_num_seqs=8, max_passes=most, max_num_batched_tokens=512)
    for i in range(6):
        b.add(f"first{i}", 10, 4 + 4 * i, **NO_EOS)
    b.step()
    b.add("big", 140, 10, **NO_EOS)
    small = 0
    while "big" not in b.first:
        b.add(f"small{small}", 10, 12, **NO_EOS)
        small += 1
        b.step()
        assert small < 200
    started = [name for name in b.order[: b.order.index("big")] if name.startswith("small")]
    assert most - 1 <= len(started) <= most  # one that was preempted passes again
    b.drain()


def test_heavy_and_plain_requests_alternate_in_few_slots(bench: Make, request_of: Make, solo: Make) -> None:
    for slots in (1, 2, 3):
        b = bench(num_blocks=24, max_num_seqs=slots)
        requests = [
            request_of(f"r{i}", 4 + i % 9, 8, min_tokens=i % 5, stop_token_ids=(i % 50,)) for i in range(100)
        ]
        for r in requests:
            b.engine.add(r)
        b.drain()
        assert all(b.tokens[r.request_id, 0] == solo(r) for r in requests)


def test_thousands_of_adds_and_aborts_leak_nothing(bench: Make) -> None:
    rng, b = random.Random(8), bench(num_blocks=30, max_num_seqs=6)
    alive: list[str] = []
    for i in range(2000):
        b.add(f"r{i}", rng.randint(1, 30), rng.randint(1, 20), n=rng.choice((1, 1, 3)))
        alive.append(f"r{i}")
        if rng.random() < 0.7:
            b.engine.abort(alive.pop(rng.randrange(len(alive))))
        if rng.random() < 0.5:
            b.step(check=i % 10 == 0)
    for name in alive:
        b.engine.abort(name)
    b.step()
    assert b.scheduler.pool.num_free == 30
    assert not b.engine.has_work
    assert b.scheduler.roster.num_held == 0

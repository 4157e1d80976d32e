"""Continuous, static and dynamic batching as gates of admission."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]
NO_EOS: dict[str, Any] = {"eos": frozenset()}


def running(b: Any) -> list[str]:
    return sorted(s.group.request.request_id for s in b.scheduler.roster.running)


def test_static_waits_for_a_full_batch_and_nobody_joins(bench: Make) -> None:
    b = bench(batching="static", max_num_seqs=3, batch_wait_s=60)
    b.add("a", 5, 2, **NO_EOS)
    b.add("b", 5, 6, **NO_EOS)
    assert b.step() == []
    assert b.engine.has_work
    assert b.engine.wake_at() == 60
    b.add("c", 5, 4, **NO_EOS)
    b.add("d", 5, 2, **NO_EOS)
    b.step()
    assert running(b) == ["a", "b", "c"]
    b.step()
    assert running(b) == ["b", "c"]
    assert b.engine.stats().slots_used == 3
    assert b.engine.admissible() == (0, 0)
    for _ in range(4):
        b.step()
    assert running(b) == []
    assert b.step() == []  # "d" alone is no full batch
    b.clock.now = 60.5
    b.step()
    assert running(b) == ["d"]
    b.drain()


def test_dynamic_starts_with_what_came_within_the_window(bench: Make) -> None:
    b = bench(batching="dynamic", max_num_seqs=8, batch_wait_s=0.05)
    b.add("a", 5, 4, **NO_EOS)
    b.step()
    b.clock.now = 0.04
    b.add("b", 5, 4, **NO_EOS)
    assert b.step() == []
    b.clock.now = 0.051
    b.step()
    assert running(b) == ["a", "b"]
    b.add("late", 5, 4, **NO_EOS)
    b.step()
    assert running(b) == ["a", "b"]
    b.clock.now = 1.0
    b.drain()
    assert b.order == ["a", "b", "late"]


def test_continuous_admits_at_the_next_step(bench: Make) -> None:
    b = bench()
    b.add("a", 5, 20, **NO_EOS)
    b.step()
    b.add("b", 5, 2, **NO_EOS)
    b.step()
    assert "b" in b.first
    assert b.engine.wake_at() is None


@pytest.mark.parametrize("mode", ["static", "dynamic", "continuous"])
def test_every_mode_gives_the_same_tokens(bench: Make, request_of: Make, solo: Make, mode: str) -> None:
    b = bench(num_blocks=20, batching=mode, batch_wait_s=0.02, max_num_seqs=4, max_num_batched_tokens=16)
    requests = [request_of(f"r{i}", 3 + i, 10, n=1 + i % 3) for i in range(15)]
    for r in requests:
        b.engine.add(r)
    b.drain()
    for r in requests:
        for choice in range(r.params.n):
            assert b.tokens[r.request_id, choice] == solo(r, choice)


def test_admissible_counts_slots_and_blocks_and_lower_classes(bench: Make) -> None:
    b = bench(num_blocks=40, block_size=4, max_num_seqs=3)
    assert b.engine.admissible() == (3, 160)
    b.add("a", 16, 4, priority=2, **NO_EOS)
    assert b.engine.admissible() == (2, 144)
    b.step()
    slots, tokens = b.engine.admissible()
    assert slots == 2
    assert 130 < tokens <= 144
    assert b.engine.admissible(priority=1) == (3, 160)
    b.engine.abort("a")
    assert b.engine.admissible() == (3, 160)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batching", "often"),
        ("policy", "mine"),
        ("num_blocks", 0),
        ("prefix_hash_bytes", 33),
        ("ageing_s", 0),
    ],
)
def test_wrong_settings_are_named(bench: Make, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        bench(**{name: value})

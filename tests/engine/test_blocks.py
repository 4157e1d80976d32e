"""The block pool: order of reuse, reference counts, audit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.blocks import BlockPool


def test_blocks_are_taken_in_order_and_uncached_ones_come_back_first() -> None:
    pool = BlockPool(6, 4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.set_cached(1, True)
    for block in (3, 1, 0):
        pool.release(block)
    assert pool.free_order() == [0, 3, 4, 5, 1]
    assert pool.allocate(5) == [0, 3, 4, 5, 1]
    assert not pool.is_cached(1)


def test_reuse_of_a_cached_block_is_told_before_it_is_taken() -> None:
    pool, told = BlockPool(2, 4), []
    pool.on_reuse = told.append
    for block in pool.allocate(2):
        pool.set_cached(block, True)
        pool.release(block)
    assert told == []
    assert pool.allocate(1) == [0]
    assert told == [0]


def test_shared_and_revived_blocks() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    pool.share(block)
    assert pool.free_order() == [1]


def test_double_free_and_overdraft_raise() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1)
    with pytest.raises(MemoryError):
        pool.allocate(2)
    pool.release(0)
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(0)


def test_the_audit_finds_a_lost_block() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(2)
    pool.check_integrity([[0, 1]])
    with pytest.raises(RuntimeError, match="not held"):
        pool.check_integrity([[0]])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_sizes_are_checked(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks, block_size)


@given(st.lists(st.tuples(st.sampled_from("asrc"), st.integers(0, 7)), max_size=60))
@settings(deadline=None)
def test_free_plus_used_is_total_whatever_happens(actions: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(8, 2), []  # type: ignore[var-annotated]
    for action, value in actions:
        if action == "a" and value <= pool.num_free:
            held += pool.allocate(value)
        elif action == "s":
            pool.share(value)
            held.append(value)
        elif action == "r" and held:
            pool.release(held.pop(value % len(held)))
        elif action == "c":
            pool.set_cached(value, not pool.is_cached(value))
        pool.check_integrity([held])
        assert pool.num_free + pool.num_used == 8
        order = pool.free_order()
        assert pool.num_cached_free == sum(map(pool.is_cached, order))

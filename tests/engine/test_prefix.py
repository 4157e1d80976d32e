"""The prefix cache: what is found, what is not, and in which order it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from worker.engine.blocks import BlockPool
from worker.engine.prefix import HashChain, PrefixCache, domain_key

Make = Callable[..., Any]


def chain_of(cache: PrefixCache, ids: list[int], salt: str = "t", adapter: str = "") -> HashChain:
    chain = cache.new_chain(salt, adapter)
    for start in range(0, len(ids) - 1, 2):
        chain.extend(ids[start : start + 2])
    return chain


def cache_of(num_blocks: int = 8, hash_bytes: int = 32) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks, 2)
    return pool, PrefixCache(pool, hash_bytes=hash_bytes)


def compute(pool: BlockPool, cache: PrefixCache, chain: HashChain) -> list[int]:
    table = pool.allocate(len(chain.keys))
    cache.publish(chain, table, len(table))
    return table


def found(cache: PrefixCache, chain: HashChain) -> list[int]:
    return [entry.block for entry in cache.match(chain, 99)]


def test_only_what_was_published_is_found_and_longest_prefix_wins() -> None:
    pool, cache = cache_of()
    table = compute(pool, cache, chain_of(cache, [1, 2, 3, 4, 5, 6]))
    assert found(cache, chain_of(cache, [1, 2, 3, 4, 9, 9])) == table[:2]
    assert found(cache, chain_of(cache, [3, 4])) == []
    assert [e.block for e in cache.match(chain_of(cache, [1, 2, 3, 4]), 1)] == table[:1]


def test_tails_are_evicted_before_their_parents_and_least_recently_released_first() -> None:
    pool, cache = cache_of(6)
    old, new = chain_of(cache, [1, 2, 3, 4, 5, 6]), chain_of(cache, [7, 8, 9, 10])
    first, second = compute(pool, cache, old), compute(pool, cache, new)
    cache.release(old, first)
    cache.release(new, second)
    assert pool.free_order() == [5, 2, 1, 0, 4, 3]
    cache.check_integrity()
    pool.allocate(2)
    assert found(cache, chain_of(cache, [1, 2, 3, 4, 5, 6])) == [0, 1]


def test_a_duplicate_is_not_published_but_keeps_the_first_fresh() -> None:
    pool, cache = cache_of()
    one, two = chain_of(cache, [1, 2, 3, 4]), chain_of(cache, [1, 2, 3, 4])
    first, second = compute(pool, cache, one), compute(pool, cache, two)
    assert cache.num_cached == 2
    cache.release(one, first)
    other = chain_of(cache, [5, 6])
    cache.release(other, compute(pool, cache, other))
    cache.release(two, second)
    assert pool.free_order()[:2] == [2, 3]
    assert pool.free_order()[-3:] == [4, 1, 0]
    cache.check_integrity()


def test_a_parent_evicted_under_a_running_child_is_published_again() -> None:
    pool, cache = cache_of(4)
    one, two = chain_of(cache, [1, 2]), chain_of(cache, [1, 2])
    first = compute(pool, cache, one)
    table = compute(pool, cache, two)
    cache.release(one, first)
    pool.allocate(3)  # reuses the block that was published
    assert found(cache, chain_of(cache, [1, 2])) == []
    pool.release(3)
    two.extend([3, 4])
    table += pool.allocate(1)
    cache.publish(two, table, 2)
    assert found(cache, chain_of(cache, [1, 2, 3, 4])) == table
    cache.check_integrity()


def test_token_boundaries_tenants_and_adapters_do_not_mix() -> None:
    pool, cache = cache_of()
    compute(pool, cache, chain_of(cache, [1, 23], salt="a", adapter="b"))
    for other in (
        chain_of(cache, [12, 3], "a", "b"),
        chain_of(cache, [1, 23], "b", "a"),
        chain_of(cache, [1, 23], "ab", ""),
        chain_of(cache, [1, 23], "", "ab"),
        chain_of(cache, [1, 23], "a", ""),
    ):
        assert found(cache, other) == []
    assert len({domain_key(tenant="a", adapter=""), domain_key(tenant="", adapter="a")}) == 2


def test_a_truncated_hash_costs_hits_but_never_gives_wrong_ones() -> None:
    pool, cache = cache_of(600, hash_bytes=1)
    chains = [chain_of(cache, [i, i + 1, i + 2, i + 3]) for i in range(300)]
    for chain in chains:
        compute(pool, cache, chain)
    cache.check_integrity()
    hits = 0
    for i in range(300):
        entries = cache.match(chain_of(cache, [i, i + 1, i + 2, i + 3]), 2)
        hits += len(entries)
        assert [e.block for e in entries] == [2 * i, 2 * i + 1][: len(entries)]
    assert 0 < hits < 300


@pytest.mark.parametrize("hash_bytes", [1, 32])
def test_nested_prefixes_give_the_same_with_and_without_the_cache(
    bench: Make, request_of: Make, solo: Make, hash_bytes: int
) -> None:
    text = [(i * i) % 50 for i in range(60)]
    for enabled in (True, False):
        b = bench(
            num_blocks=40, prefix_cache=enabled, prefix_hash_bytes=hash_bytes, max_num_batched_tokens=20
        )
        for turn in range(3):
            for i in range(25):
                b.engine.add(request_of(f"{turn}-{i}", text[: 5 + 2 * i], 4, seed=1))
            b.drain()
        for i in range(25):
            want = solo(request_of("x", text[: 5 + 2 * i], 4, seed=1))
            assert [b.tokens[f"{turn}-{i}", 0] for turn in range(3)] == [want] * 3
        assert (b.engine.stats().prefix_hit_tokens > 0) is enabled


def test_a_burst_with_a_common_prefix_computes_it_once(bench: Make, solo: Make, request_of: Make) -> None:
    prefix = [(i * 7) % 50 for i in range(120)]
    requests = [request_of(f"r{i}", [*prefix, i, i + 1], 5, seed=i) for i in range(8)]
    computed = {}
    for wait in (64, 0):
        b = bench(num_blocks=400, max_num_batched_tokens=48, prefix_wait_tokens=wait)
        for r in requests:
            b.engine.add(r)
        b.drain()
        assert all(b.tokens[r.request_id, 0] == solo(r) for r in requests)
        computed[wait] = b.engine.stats().computed_tokens
    assert computed[64] <= 122 + 7 * 2 + 8 * 5 + 64  # less than 64 tokens are not worth a wait
    assert computed[0] > 2 * computed[64]


def test_waiting_for_a_prefix_ends_when_its_owner_leaves(bench: Make, solo: Make, request_of: Make) -> None:
    prefix = list(range(50)) * 4
    b = bench(num_blocks=400, max_num_batched_tokens=32)
    first, second = request_of("a", [*prefix, 1], 3), request_of("b", [*prefix, 2], 3)
    b.engine.add(first)
    b.engine.add(second)
    b.step()
    b.step()
    assert [p.seq_id for p in b.runner.plans[-1].sequences] == [1]
    b.engine.abort("a")
    b.drain()
    assert b.tokens["b", 0] == solo(second)
    assert b.first["b"].cached_tokens == 64


def test_hits_are_only_within_a_tenant(bench: Make) -> None:
    b = bench()
    prompt = list(range(20))
    for name, salt, adapter in (("one", "a", ""), ("two", "b", ""), ("three", "", "a"), ("four", "a", "")):
        b.add(name, prompt, 2, salt=salt, adapter=adapter)
        b.drain()
    assert [b.first[n].cached_tokens for n in ("one", "two", "three", "four")] == [0, 0, 0, 16]


def test_generated_blocks_serve_the_next_turn(bench: Make) -> None:
    b = bench()
    b.add("turn1", range(10), 11, eos=frozenset())
    b.drain()
    b.add("turn2", [*range(10), *b.tokens["turn1", 0], 1, 2, 3], 2)
    b.drain()
    assert b.first["turn2"].cached_tokens == 20

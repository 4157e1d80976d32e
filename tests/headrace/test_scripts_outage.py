"""A lease that ran out while nobody could reach the server says nothing about its holder."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = pytest.mark.redis

LEASE_MS = 2_000


async def silent_for(pool: Any, silent_ms: int, lapsed_ms: int) -> None:
    """As after an outage of `silent_ms`, in which every lease ran out, the first `lapsed_ms` ago."""
    now_ms = int(time.time() * 1000)  # the server runs here
    await pool.redis.hset(pool.keys.vtime, "seen", now_ms - silent_ms)
    for member in await pool.redis.zrange(pool.keys.leases, 0, -1):
        await pool.redis.zadd(pool.keys.leases, {member: now_ms - lapsed_ms})


async def test_after_an_outage_holders_have_time_to_say_that_they_live(pool: Any) -> None:
    for _ in range(3):
        await pool.add()
    entries = await pool.pick(3, "w1", lease_ms=LEASE_MS)
    claims = await pool.claim(entries, "w1", lease_ms=LEASE_MS)
    await silent_for(pool, 10_000, lapsed_ms=8_000)
    picked = await pool.scripts.pick("w2", 5, budget_tokens=1000, lease_ms=LEASE_MS)
    assert (picked.entries, picked.apart, picked.on_duty) == ([], False, False)
    held = [(e.job_class, e.entry_id, c.job_id, c.epoch) for e, c in zip(entries, claims, strict=True)]
    assert not (await pool.scripts.renew("w1", held, lease_ms=LEASE_MS)).lost
    assert await pool.pick(5, "w2", lease_ms=LEASE_MS) == []
    assert not await pool.redis.exists(pool.keys.suspects)


async def test_whoever_asks_first_after_an_outage_may_be_the_reaper(pool: Any) -> None:
    await pool.add()
    await pool.claim(await pool.pick(1, "w1", lease_ms=LEASE_MS), "w1", lease_ms=LEASE_MS)
    await silent_for(pool, 10_000, lapsed_ms=8_000)
    await pool.scripts.reap()
    assert await pool.pick(5, "w2", lease_ms=LEASE_MS) == []


async def test_a_holder_that_stays_silent_is_taken_for_dead(pool: Any) -> None:
    await pool.add()
    await pool.claim(await pool.pick(1, "w1", lease_ms=200), "w1", lease_ms=200)
    await silent_for(pool, 10_000, lapsed_ms=8_000)
    assert await pool.pick(1, "w2", lease_ms=200) == []
    end_s = time.monotonic() + 5
    while not (picked := await pool.scripts.pick("w2", 1, budget_tokens=1000, lease_ms=200)).entries:
        assert time.monotonic() < end_s
    assert picked.apart


@pytest.mark.parametrize(("silent_ms", "lapsed_ms"), [(100, 50), (10_000, 11_000)])
async def test_a_death_without_an_outage_waits_for_nothing(pool: Any, silent_ms: int, lapsed_ms: int) -> None:
    """The pool was heard from meanwhile, or the lease had run out before it fell silent."""
    await pool.add()
    await pool.claim(await pool.pick(1, "w1", lease_ms=LEASE_MS), "w1", lease_ms=LEASE_MS)
    await silent_for(pool, silent_ms, lapsed_ms)
    assert len(await pool.pick(1, "w2", lease_ms=LEASE_MS)) == 1


async def test_a_server_that_is_away_again_and_again_lets_go_of_a_dead_worker(pool: Any) -> None:
    await pool.add()
    await pool.claim(await pool.pick(1, "w1", lease_ms=LEASE_MS), "w1", lease_ms=LEASE_MS)
    await silent_for(pool, 10_000, lapsed_ms=8_000)
    assert await pool.pick(1, "w2", lease_ms=LEASE_MS) == []
    (member, given_ms), *_ = await pool.redis.zrange(pool.keys.leases, 0, -1, withscores=True)
    await pool.redis.hset(pool.keys.vtime, "seen", given_ms - 10_000 - 4_000)
    await pool.redis.zadd(
        pool.keys.leases, {member: given_ms - 10_000}
    )  # the next outage outlasts what was given
    assert len(await pool.pick(1, "w2", lease_ms=LEASE_MS)) == 1

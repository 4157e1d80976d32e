"""Readers that hear nothing: what the channel did not tell them is found, and asking costs little."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.follow import Follower
from headrace.following import Following
from headrace.messages import Delta

pytestmark = pytest.mark.redis


@pytest.fixture
async def follower(pool: Any) -> AsyncIterator[Follower]:
    async with Follower(pool.server.unix_url) as one:
        yield one


async def started(pool: Any, kit: Any, follower: Follower) -> tuple[str, Following]:
    """A job that has said one event, and somebody who has read it and waits."""
    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1, "1")]))
    batches = follower.follow_in_batches(pool.keys, claimed.job_id)
    assert [event.seq for event in await anext(batches)] == [1]
    return claimed.job_id, batches


async def test_what_was_never_published_is_read(pool: Any, kit: Any, follower: Follower) -> None:
    job_id, batches = await started(pool, kit, follower)
    async with aclosing(batches):
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.2)  # behind the subscription, whose own look into the log finds nothing
        await pool.redis.xadd(pool.keys.log(job_id), {"type": "delta", "text": "2"}, id="2-0")
        await pool.redis.hset(pool.keys.job(job_id), "seq", 2)
        assert await asyncio.wait_for(waiting, 3) == [Delta(seq=2, text="2")]


async def test_another_event_in_place_of_the_last_one(pool: Any, kit: Any, follower: Follower) -> None:
    job_id, batches = await started(pool, kit, follower)
    async with aclosing(batches):
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.2)
        await pool.redis.delete(pool.keys.log(job_id))
        await pool.redis.xadd(pool.keys.log(job_id), {"type": "delta", "text": "other"}, id="1-0")
        with pytest.raises(HeadraceError) as caught:
            await asyncio.wait_for(waiting, 3)
    assert caught.value.code == "lost"


async def test_a_job_that_is_gone(pool: Any, kit: Any, follower: Follower) -> None:
    _, batches = await started(pool, kit, follower)
    async with aclosing(batches):
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.2)
        await pool.redis.flushall()
        with pytest.raises(HeadraceError) as caught:
            await asyncio.wait_for(waiting, 3)
    assert caught.value.code == "lost"


async def test_many_wait_at_the_cost_of_few_questions(pool: Any, kit: Any, follower: Follower) -> None:
    waiting = []
    async with AsyncExitStack() as stack:
        for number in range(300):
            submitted = await pool.scripts.submit("normal", f"job{number}", {"prompt": "hi"})
            batches = follower.follow_in_batches(pool.keys, submitted.job_id)
            await stack.enter_async_context(aclosing(batches))
            waiting.append(asyncio.ensure_future(anext(batches)))
            stack.callback(waiting[-1].cancel)
        # Once subscribed, each looks into the log itself; from then on nearly all are asked for together.
        before = await calls(pool, "exec", 300)
        after = await calls(pool, "hmget", before["hmget"] + 600)
    assert after["exec"] - before["exec"] < 60
    assert after["xrange"] - before["xrange"] < 60  # before its first event a job's state tells all
    await asyncio.gather(*waiting, return_exceptions=True)


NAMES = ("hmget", "xrange", "exec")


async def calls(pool: Any, awaited: str, at_least: int) -> dict[str, int]:
    async with asyncio.timeout(20):
        while True:
            stats = await pool.redis.info("commandstats")
            found = {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in NAMES}
            if found[awaited] >= at_least:
                return found
            await asyncio.sleep(0.05)

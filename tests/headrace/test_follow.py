"""Readers see every event once, in order, whatever happens to their connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from redis.exceptions import RedisError

from headrace.errors import HeadraceError
from headrace.follow import Follower
from headrace.live import MAILBOX_EVENTS
from headrace.messages import Delta, End, Event

pytestmark = pytest.mark.redis


@pytest.fixture
async def follower(pool: Any) -> AsyncIterator[Follower]:
    async with Follower(pool.server.unix_url) as one:
        yield one


async def collect(follower: Follower, pool: Any, job_id: str, after_seq: int = 0) -> list[Event]:
    async with aclosing(follower.follow(pool.keys, job_id, after_seq)) as events:
        return [event async for event in events]


async def run_job(pool: Any, kit: Any, tokens: int, pause_s: float = 0.0) -> str:
    entry, claimed = await pool.take()
    for seq in range(1, tokens + 1):
        assert await pool.emit(kit.item(entry, claimed, [kit.delta(seq, str(seq))])) == ["ok"]
        await asyncio.sleep(pause_s)
    assert await pool.emit(kit.item(entry, claimed, kit.ending(tokens + 1, tokens))) == ["ok"]
    return claimed.job_id


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Delta)]


def assert_whole(events: list[Event], tokens: int) -> None:
    assert [event.seq for event in events] == list(range(1, tokens + 3))
    assert texts(events) == [str(seq) for seq in range(1, tokens + 1)]
    assert isinstance(events[-1], End)


async def test_before_during_and_after(pool: Any, kit: Any, follower: Follower) -> None:
    entry_id = await pool.add()
    early = asyncio.create_task(collect(follower, pool, f"normal-{entry_id}"))
    running = asyncio.create_task(run_job(pool, kit, 30, 0.002))
    await asyncio.sleep(0.03)
    during = asyncio.create_task(collect(follower, pool, f"normal-{entry_id}"))
    job_id = await running
    for events in (await early, await during, await collect(follower, pool, job_id)):
        assert_whole(events, 30)


async def test_resume_from_each_seq(pool: Any, kit: Any, follower: Follower) -> None:
    await pool.add()
    job_id = await run_job(pool, kit, 5)
    for after in range(8):
        assert [e.seq for e in await collect(follower, pool, job_id, after)] == list(range(after + 1, 8))
    with pytest.raises(HeadraceError, match="after_seq"):
        await collect(follower, pool, job_id, 8)


async def test_a_long_log_is_read_in_pages(pool: Any, kit: Any, follower: Follower) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(s, str(s)) for s in range(1, 1701)]))
    await pool.emit(kit.item(entry, claimed, kit.ending(1701, 1700)))
    assert_whole(await collect(follower, pool, claimed.job_id), 1700)


async def test_resume_of_an_unknown_job_is_lost(pool: Any, follower: Follower) -> None:
    with pytest.raises(HeadraceError, match="no longer stored"):
        await collect(follower, pool, "never", 3)


async def test_twenty_readers_in_a_storm_of_killed_connections(pool: Any, kit: Any) -> None:
    tokens, followers = 120, [Follower(pool.server.unix_url) for _ in range(4)]
    entry_ids = [await pool.add() for _ in range(20)]
    readers = [
        asyncio.create_task(collect(followers[i % 4], pool, f"normal-{entry_id}"))
        for i, entry_id in enumerate(entry_ids)
    ]
    entries = await pool.pick(20)
    claims = await pool.claim(entries)
    storm = asyncio.create_task(kill_pubsub(pool))
    for seq in range(1, tokens + 1):
        step = [kit.item(e, c, [kit.delta(seq, str(seq))]) for e, c in zip(entries, claims, strict=True)]
        assert set(await pool.emit(*step)) == {"ok"}
        await asyncio.sleep(0.01)
    last = [kit.item(e, c, kit.ending(tokens + 1, tokens)) for e, c in zip(entries, claims, strict=True)]
    await pool.emit(*last)
    results = await asyncio.wait_for(asyncio.gather(*readers), 30)
    storm.cancel()
    for events in results:
        assert_whole(events, tokens)
    for one in followers:
        await one.close()


async def kill_pubsub(pool: Any) -> None:
    while True:
        await pool.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await asyncio.sleep(0.07)


async def test_the_server_frozen_in_between(pool: Any, kit: Any, follower: Follower) -> None:
    entry_id = await pool.add()
    reader = asyncio.create_task(collect(follower, pool, f"normal-{entry_id}"))
    running = asyncio.create_task(run_job(pool, kit, 40, 0.005))
    await asyncio.sleep(0.1)
    pool.server.pause()
    await asyncio.sleep(0.5)
    pool.server.resume()
    await running
    assert_whole(await asyncio.wait_for(reader, 20), 40)


async def test_a_restart_of_the_server(pool: Any, kit: Any, follower: Follower) -> None:
    entry_id = await pool.add()
    reader = asyncio.create_task(collect(follower, pool, f"normal-{entry_id}"))
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1, "1"), kit.delta(2, "2")]))
    await asyncio.sleep(1.2)  # the append-only file is written each second
    await asyncio.to_thread(pool.server.restart)
    await pool.redis.connection_pool.disconnect()
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(3, "3"), *kit.ending(4, 3)])) == ["ok"]
    assert_whole(await asyncio.wait_for(reader, 20), 3)


async def test_flushall_is_reported_to_the_reader(pool: Any, kit: Any, follower: Follower) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1)]))
    seen: list[Event] = []

    async def read() -> None:
        async with aclosing(follower.follow(pool.keys, claimed.job_id)) as events:
            async for event in events:
                seen.append(event)
                await pool.redis.flushall()

    with pytest.raises(HeadraceError) as caught:
        await read()
    assert (caught.value.code, len(seen)) == ("lost", 1)


async def test_the_end_that_reports_a_loss_is_read(pool: Any, kit: Any, follower: Follower) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1), kit.delta(2)]))
    error = HeadraceError("lost").to_wire()
    seen: list[Event] = []
    async with aclosing(follower.follow(pool.keys, claimed.job_id)) as events:
        async for event in events:
            seen.append(event)
            if event.seq == 2:
                await pool.redis.delete(pool.keys.log(claimed.job_id))
                end = End(seq=3, status="failed", error=error)
                await pool.emit(kit.item(entry, claimed, [end], force=True))
    assert (seen[-1].seq, seen[-1].error["code"]) == (3, "lost")


async def test_a_log_that_went_back_and_took_another_way_is_not_spliced(
    pool: Any, kit: Any, follower: Follower
) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1, "a"), kit.delta(2, "b")]))
    log = pool.keys.log(claimed.job_id)

    async def read() -> None:
        async with aclosing(follower.follow(pool.keys, claimed.job_id)) as events:
            async for event in events:
                if event.seq == 2:
                    await pool.redis.delete(log)
                    for seq, text in ((1, "a"), (2, "other"), (3, "c")):
                        await pool.redis.xadd(log, {"type": "delta", "text": text}, id=f"{seq}-0")

    with pytest.raises(HeadraceError) as caught:
        await read()
    assert caught.value.code == "lost"


async def test_no_subscription_outlives_its_reader(pool: Any, kit: Any, follower: Follower) -> None:
    entry_ids = [await pool.add() for _ in range(50)]

    async def leave_early(entry_id: str) -> None:
        reader = asyncio.create_task(collect(follower, pool, f"normal-{entry_id}"))
        await asyncio.sleep(hash(entry_id) % 7 / 100)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    await asyncio.gather(*map(leave_early, entry_ids))
    async with asyncio.timeout(10):
        while await pool.redis.pubsub_channels():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.01)


async def test_a_slow_reader_holds_little_and_misses_nothing(pool: Any, kit: Any, follower: Follower) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    total, seen = MAILBOX_EVENTS * 4, []
    async with aclosing(follower.follow(pool.keys, claimed.job_id)) as events:
        await pool.emit(kit.item(entry, claimed, [kit.delta(1, "1")]))
        seen.append(await anext(events))
        for seq in range(2, total + 1):
            await pool.emit(kit.item(entry, claimed, [kit.delta(seq, str(seq))]))
        await pool.emit(kit.item(entry, claimed, kit.ending(total + 1, total)))
        seen += [event async for event in events]
    assert_whole(seen, total)


async def test_an_outage_longer_than_allowed_is_an_error(pool: Any, kit: Any) -> None:
    async with Follower(pool.server.unix_url, outage_s=0.2) as follower:
        pool.server.kill()
        with pytest.raises((RedisError, OSError)):
            await asyncio.wait_for(collect(follower, pool, "any"), 20)


async def test_a_job_that_was_taken_in_and_is_gone_is_lost_and_not_waited_for(
    pool: Any, follower: Follower
) -> None:
    submitted = await pool.scripts.submit("normal", "gone", {"prompt": "hi"})
    follower.know(pool.keys, submitted.job_id)
    await pool.redis.flushall()
    async with asyncio.timeout(5):
        with pytest.raises(HeadraceError) as caught:
            await collect(follower, pool, submitted.job_id)
    assert caught.value.code == "lost"

"""The server's own troubles: no memory, read-only, scripts forgotten, connections and server killed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError

pytestmark = pytest.mark.redis


async def test_out_of_memory_is_told_apart_and_passes(pool: Any, kit: Any) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    step = kit.item(entry, claimed, [kit.delta(1)])
    await pool.redis.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        await pool.scripts.submit("normal", "more", {"prompt": "a"})
    with pytest.raises(OutOfMemoryError):
        await pool.emit(step)
    await pool.redis.config_set("maxmemory", 0)
    assert await pool.emit(step) == ["ok"]
    assert await pool.emit(kit.item(entry, claimed, kit.ending(2, 1))) == ["ok"]
    await pool.assert_no_entries_left()


async def test_read_only_is_told_apart_and_passes(pool: Any, kit: Any) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    step = kit.item(entry, claimed, [kit.delta(1)])
    await pool.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(ReadOnlyError):
        await pool.emit(step)
    with pytest.raises(RedisError):
        await pool.pick()
    await pool.redis.execute_command("REPLICAOF", "NO", "ONE")
    assert await pool.emit(step) == ["ok"]


async def test_scripts_forgotten_all_the_time(pool: Any, kit: Any) -> None:
    stop = asyncio.Event()

    async def forget() -> None:
        while not stop.is_set():
            await pool.redis.script_flush()
            await asyncio.sleep(0)

    forgetting = asyncio.create_task(forget())
    for _ in range(30):
        await pool.add()
        entry, claimed = await pool.take()
        await pool.emit(kit.item(entry, claimed, [kit.delta(1), *kit.ending(2, 1)]))
    stop.set()
    await forgetting
    await pool.assert_no_entries_left()


async def test_every_connection_killed_at_random_moments(pool: Any, kit: Any) -> None:
    """Calls repeated as they were after a lost reply: every log is whole, and nothing is left."""
    from headrace.connect import connect

    tokens, jobs, killer = 10, 12, connect(pool.server.unix_url, max_connections=1)
    ids = [await pool.add(prompt="a") for _ in range(jobs)]
    stop, lost_replies = asyncio.Event(), []

    async def kill() -> None:
        while not stop.is_set():
            await killer.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.003)

    async def surely(call: Any) -> Any:
        while True:
            try:
                return await call()
            except (RedisError, OSError) as error:
                lost_replies.append(error)
                await asyncio.sleep(0)

    async def work(name: str) -> None:
        while entries := await surely(lambda: pool.pick(2, name)):
            claims = await surely(lambda e=entries: pool.claim(e, name, max_attempts=99, nonce=f"{name}{e}"))
            pairs = [pair for pair in zip(entries, claims, strict=True) if pair[1].outcome == "run"]
            for seq in range(1, tokens + 1):
                step = [kit.item(e, c, [kit.delta(seq)]) for e, c in pairs if seq > c.last_seq]
                assert set(await surely(lambda s=step: pool.emit(*s))) <= {"ok"}
            last = [kit.item(e, c, kit.ending(tokens + 1, tokens)) for e, c in pairs]
            assert set(await surely(lambda s=last: pool.emit(*s))) <= {"ok"}

    killing = asyncio.create_task(kill())
    for _ in range(50):
        await work("w1")
        await surely(pool.expire_leases)  # what a lost pick handed out
        if not await surely(lambda: pool.redis.xlen(pool.keys.queue("normal"))):
            break
    stop.set()
    await killing
    await killer.aclose()
    assert lost_replies
    for entry_id in ids:
        assert [e.seq for e in await pool.log(f"normal-{entry_id}")] == list(range(1, tokens + 3))
    await pool.assert_no_entries_left()


async def test_a_kill_of_the_server_keeps_scripts_whole(pool: Any, kit: Any) -> None:
    for _ in range(20):
        await pool.add()
    entries = await pool.pick(20)
    claims = await pool.claim(entries)
    for seq in range(1, 30):
        await pool.emit(*(kit.item(e, c, [kit.delta(seq)]) for e, c in zip(entries, claims, strict=True)))
    await asyncio.to_thread(pool.server.restart)
    await pool.redis.connection_pool.disconnect()
    for claimed in claims:
        state = await pool.job(claimed.job_id)
        assert int(state.get("seq", 0)) == await pool.redis.xlen(pool.keys.log(claimed.job_id))
    await pool.scripts.reap()
    await pool.expire_leases()
    again = await pool.claim(await pool.pick(20, "w2"), "w2")
    assert {claimed.outcome for claimed in again} == {"run"}

"""The Python producer against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.client import Client
from headrace.errors import HeadraceError
from headrace.submission import Limits, parse_entry

pytestmark = pytest.mark.redis


@pytest.fixture
async def client(pool: Any) -> AsyncIterator[Client]:
    async with Client(pool.server.unix_url, "t") as one:
        yield one


async def test_submit_follow_poll_wait(pool: Any, kit: Any, client: Client) -> None:
    job_id = await client.submit("why?", max_tokens=5, stop=("x",), ttl_ms=60_000, meta={"a": 1})
    state = await client.poll(job_id)
    assert state is not None
    assert (state.status, state.ended, state.attempt) == ("queued", False, 0)
    waiting = asyncio.create_task(client.wait(job_id, 20))
    entry, claimed = await pool.take()
    job = parse_entry("t", entry.job_class, entry.entry_id, entry.fields, Limits())
    assert (job.id, job.prompt, job.params.max_tokens, job.params.stop) == (job_id, "why?", 5, ("x",))
    assert (job.ttl_ms, bytes(job.meta or b"")) == (60_000, b'{"a":1}')
    await pool.emit(kit.item(entry, claimed, [kit.delta(1, "because"), *kit.ending(2, 1)]))
    ended = await waiting
    assert (ended.status, ended.seq, ended.worker) == ("done", 3, "w1")
    assert ended.usage is not None
    assert ended.usage.completion_tokens == 1
    assert [event.seq async for event in client.follow(job_id, 1)] == [2, 3]


async def test_cancel_in_each_state(pool: Any, kit: Any, client: Client) -> None:
    waiting = await client.submit("a")
    assert await client.cancel(waiting) is True
    state = await client.wait(waiting, 10)
    assert state.status == "cancelled"
    running = await client.submit("b")
    entry, claimed = await pool.take()
    assert await client.cancel(running) is True
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(1)])) == ["cancel"]
    await pool.emit(kit.item(entry, claimed, kit.ending(2, 1)))
    assert await client.cancel(running) is False


async def test_a_bad_parameter_never_reaches_the_queue(pool: Any, client: Client) -> None:
    with pytest.raises(HeadraceError) as caught:
        await client.submit("a", temperature="hot")
    assert caught.value.field == "temperature"
    assert not await pool.redis.exists(pool.keys.queue("normal"))


async def test_a_lost_reply_does_not_submit_twice(
    pool: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, second = client._scripts.submit, asyncio.Event()
    tries = 0

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 2:
            second.set()
        return await submit(*args, **options)

    monkeypatch.setattr(client._scripts, "submit", counted)
    client._redis.connection_pool.connection_kwargs["socket_timeout"] = 0.5
    pool.server.pause()
    submitting = asyncio.create_task(client.submit("once"))
    await asyncio.wait_for(second.wait(), 10)  # the first try is in the server's buffer
    pool.server.resume()
    job_id = await submitting
    assert await pool.redis.xlen(pool.keys.queue("normal")) == 1
    assert (await client.poll(job_id)).status == "queued"


async def test_wait_for_what_does_not_come(client: Client) -> None:
    job_id = await client.submit("a")
    with pytest.raises(TimeoutError):
        await client.wait(job_id, 0.1)
    assert await client.poll("unknown") is None

"""The outbox: every end of a job with a webhook is noted once, in the change of state that ends the job."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.redis
URL = "https://example.com/hook?a=1"


async def hooks(pool: Any) -> list[dict[str, str]]:
    entries = await pool.redis.xrange(pool.keys.hooks)
    return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in entries]


async def test_a_last_event_notes_the_hook_once(pool: Any, kit: Any) -> None:
    await pool.add(prompt="x", id="j1", tenant="acme", webhook=URL)
    entry, claimed = await pool.take()
    last = kit.item(entry, claimed, [kit.delta(1), *kit.ending(2, 1)])
    assert await pool.emit(last) == ["ok"]
    assert await pool.emit(last) == ["ok"]
    (hook,) = await hooks(pool)
    at = (await pool.job("j1"))["t_end"]
    assert hook == {"job": "j1", "url": URL, "tenant": "acme", "status": "done", "at": at}
    assert await pool.redis.pttl(pool.keys.hooks) > 0


async def test_a_zombie_notes_nothing(pool: Any, kit: Any) -> None:
    await pool.add(prompt="x", id="j1", webhook=URL)
    entry, first = await pool.take()
    await pool.expire_leases()
    _, second = await pool.take("w2")
    assert await pool.emit(kit.item(entry, first, kit.ending(1))) == ["stale"]
    assert await hooks(pool) == []
    assert await pool.emit(kit.item(entry, second, kit.ending(1))) == ["ok"]
    assert [hook["status"] for hook in await hooks(pool)] == ["done"]


async def test_ends_by_the_server_note_it_too(pool: Any) -> None:
    waiting = "normal-" + await pool.add(prompt="x", webhook=URL)
    await pool.pick(0)
    assert await pool.scripts.cancel(waiting) == "ended"
    await pool.add(prompt="x", id="late", webhook=URL, tenant="acme", ttl_ms=1)
    await pool.pick(0)
    while (await pool.scripts.reap()).ended == 0:
        pass
    await pool.add(prompt="x", id="poison", webhook=URL)
    await pool.take(max_attempts=1)
    await pool.expire_leases()
    _, claimed = await pool.take(max_attempts=1)
    assert claimed.outcome == "exhausted"
    found = [(hook["job"], hook["status"], hook["tenant"]) for hook in await hooks(pool)]
    assert found == [
        (waiting, "cancelled", "default"),
        ("late", "failed", "acme"),
        ("poison", "failed", "default"),
    ]


@pytest.mark.parametrize("url", ["", "ftp://x/", "http:// x", "http://" + "a" * 3000, "javascript:1"])
async def test_what_is_no_url_is_not_noted(pool: Any, kit: Any, url: str) -> None:
    await pool.add(prompt="x", webhook=url)
    entry, claimed = await pool.take()
    assert await pool.emit(kit.item(entry, claimed, kit.ending(1))) == ["ok"]
    assert await hooks(pool) == []


async def test_jobs_without_a_webhook_leave_no_stream(pool: Any, kit: Any) -> None:
    await pool.add(prompt="x")
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, kit.ending(1)))
    assert not await pool.redis.exists(pool.keys.hooks)


async def test_a_stranger_at_the_streams_key_keeps_no_job_from_ending(pool: Any, kit: Any) -> None:
    await pool.redis.set(pool.keys.hooks, "x")
    await pool.add(prompt="x", id="j1", webhook=URL)
    entry, claimed = await pool.take()
    assert await pool.emit(kit.item(entry, claimed, kit.ending(1))) == ["ok"]
    assert (await pool.job("j1"))["status"] == "done"

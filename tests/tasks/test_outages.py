"""The tasks process through outages of Redis, kills, and tasks that do not end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

pytestmark = pytest.mark.redis


async def test_an_outage_of_three_seconds_ends_nothing(
    redis_server: Any, db: Any, jobs: Any, endpoint: Any, spawn_tasks: Any
) -> None:
    process = spawn_tasks()
    await jobs.finish("before", endpoint.url)
    await endpoint.wait_for(1)
    await asyncio.to_thread(redis_server.kill)
    await asyncio.sleep(3)
    await asyncio.to_thread(redis_server.start)
    await jobs.finish("after", endpoint.url)
    await endpoint.wait_for(2)
    with redis_server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    with suppress(RedisConnectionError):
        await db.ping()
    await jobs.finish("connections-killed", endpoint.url)
    await endpoint.wait_for(3)
    assert process.poll() is None


async def test_what_was_due_before_an_outage_is_delivered_after_it(
    redis_server: Any, jobs: Any, endpoint: Any, spawn_tasks: Any
) -> None:
    await jobs.finish("noted", endpoint.url)
    await asyncio.to_thread(redis_server.kill)
    process = spawn_tasks()
    await asyncio.sleep(2)
    assert process.poll() is None
    await asyncio.to_thread(redis_server.start)
    (received,) = await endpoint.wait_for(1)
    assert b"noted" in received.body


async def test_a_killed_process_loses_no_delivery(
    db: Any, jobs: Any, endpoint: Any, spawn_tasks: Any, kit: Any
) -> None:
    endpoint.replies = [None]
    first = spawn_tasks()
    await jobs.finish("j1", endpoint.url)
    await endpoint.wait_for(1)
    first.kill()
    began_s = time.monotonic()
    spawn_tasks()
    received = await endpoint.wait_for(2)
    assert time.monotonic() - began_s < 30
    assert received[0].headers["webhook-id"] == received[1].headers["webhook-id"]

    async def settled() -> bool:
        return await db.zcard(jobs.keys.due) == 0

    await kit.eventually(settled)


async def test_sigterm_ends_it_and_hands_back_what_hangs(jobs: Any, endpoint: Any, spawn_tasks: Any) -> None:
    endpoint.replies = [None]
    process = spawn_tasks(webhook_timeout_s=8.0)
    await jobs.finish("j1", endpoint.url)
    await endpoint.wait_for(1)
    os.kill(process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 10) == 0
    spawn_tasks()
    await endpoint.wait_for(2)

"""The asyncio client under cancellation, on which every orderly stop depends."""

import asyncio

import pytest

from headrace.connect import connect

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("kind", ["url", "unix_url"])
async def test_a_cancelled_task_stops(redis_server: object, kind: str) -> None:
    client = connect(getattr(redis_server, kind))

    async def ask_for_ever() -> None:
        while True:
            await client.get("x")

    for attempt in range(100):
        task = asyncio.create_task(ask_for_ever())
        await asyncio.sleep(0.002 + attempt * 0.00013)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=2)
        assert done, f"attempt {attempt} lost the cancellation"
    assert await client.ping()
    await client.aclose()

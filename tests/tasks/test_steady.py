from __future__ import annotations

import asyncio
from typing import Any

import arq
import pytest

from gateway.tasks.steady import SteadyWorker, arq_client, decode, encode, enqueue
from gateway.tasks.sweeps import periodic

pytestmark = pytest.mark.redis
QUEUE = "hr:arq:test"


def test_exceptions_become_names() -> None:
    assert decode(encode({"r": ValueError("secret"), "a": (1, "x")})) == {"r": "ValueError", "a": [1, "x"]}


async def test_slots_survive_outages_in_the_middle_of_taking_tasks(redis_server: Any, db: Any) -> None:
    ran: list[int] = []
    done = asyncio.Event()

    async def work(_: dict[str, Any], number: int) -> None:
        ran.append(number)
        if len(set(ran)) == 40:
            done.set()

    function = arq.func(work, name="work", timeout=1)  # type: ignore[arg-type]
    worker = SteadyWorker(db, QUEUE, functions=[function], max_jobs=2, job_timeout=1)
    task = asyncio.create_task(worker.main())
    client = arq_client(db, QUEUE)
    for number in range(40):
        await client.enqueue_job("work", number, _job_id=f"t{number}")
    with redis_server.client() as plain:
        for _ in range(20):
            plain.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(0.02)
    async with asyncio.timeout(30):
        await done.wait()
    await worker.drain(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_sweep_runs_once_in_two_processes_and_while_slots_are_taken(db: Any) -> None:
    ran: list[str] = []
    swept = asyncio.Event()
    held = asyncio.Event()

    async def hang(_: dict[str, Any]) -> None:
        await held.wait()

    async def sweep(ctx: dict[str, Any]) -> None:
        ran.append(ctx["job_id"])
        if len(set(ran)) == 2:
            swept.set()

    held_up = arq.func(hang, name="hang", timeout=30)  # type: ignore[arg-type]
    hanging = SteadyWorker(
        db,
        QUEUE,
        functions=[held_up],
        max_jobs=2,
        job_timeout=30,
    )
    sweepers = [
        SteadyWorker(db, QUEUE + ":2", cron_jobs=[periodic("s", sweep, set(range(60)))], job_timeout=5)
        for _ in range(2)
    ]
    for number in range(2):
        await arq_client(db, QUEUE).enqueue_job("hang", _job_id=f"h{number}")
    tasks = [asyncio.create_task(worker.main()) for worker in (hanging, *sweepers)]
    async with asyncio.timeout(30):
        await swept.wait()
    assert len(ran) == len(set(ran))
    held.set()
    for worker in (hanging, *sweepers):
        await worker.drain(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_another_clock_keeps_nothing_waiting(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued by a clock that is two minutes ahead, taken by one that is two minutes behind."""
    ran = asyncio.Event()

    async def work(_: dict[str, Any]) -> None:
        ran.set()

    now_ms = arq.connections.timestamp_ms
    client = arq_client(db, QUEUE)
    monkeypatch.setattr(arq.connections, "timestamp_ms", lambda: now_ms() + 120_000)
    assert await enqueue(client, "work", job_id="t")
    assert not await enqueue(client, "work", job_id="t")
    monkeypatch.setattr(arq.worker, "timestamp_ms", lambda: now_ms() - 120_000)
    function = arq.func(work, name="work", timeout=1)  # type: ignore[arg-type]
    worker = SteadyWorker(db, QUEUE, functions=[function], job_timeout=1)
    task = asyncio.create_task(worker.main())
    async with asyncio.timeout(10):
        await ran.wait()
    await worker.drain(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

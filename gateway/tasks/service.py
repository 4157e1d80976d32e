"""The tasks process: notes become deliveries, due work goes to arq, arq runs it; Redis alone remembers.

Any number of these may run. One that dies loses nothing: what it had taken is due again when its lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import arq
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway.batches.runner import BatchRunner
from gateway.batches.store import Batches
from gateway.directory import Directory
from gateway.limits import Limits
from gateway.lua import redis_now_ms
from gateway.pulse import Pulse
from gateway.tasks.deliveries import Deliveries
from gateway.tasks.outbound import Outbound
from gateway.tasks.steady import SteadyWorker, arq_client, enqueue
from gateway.tasks.sweeps import SWEEP_S, sweeps
from gateway.tasks.webhooks import Courier
from gateway.tenants import Tenants
from headrace.config import TasksSettings, redact_url
from headrace.connect import connect
from headrace.keys import ARQ_TAG, TASK_QUEUE, WEBHOOK_QUEUE

DISPATCH_S = 0.25
SOON_MS = 300
MAX_WEBHOOKS = 64
MAX_TASKS = 16
MAX_CONNECTIONS = 32
TASK_S = SWEEP_S
ATTEMPT_MARGIN_S = 2.0
LEASE_MARGIN_S = 5.0
log = structlog.get_logger("headrace.tasks")


class _Waiting:
    """Stands for the gateway's pulse: here nobody waits for an answer, so Redis may take its time."""

    async def guard(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work


class Tasks:
    """One process's loops. `run` returns after `stop`, when what ran has ended or was handed back."""

    def __init__(self, settings: TasksSettings, redis: Redis | None = None) -> None:
        self._settings = settings
        self._redis = redis or connect(settings.redis_url, max_connections=MAX_CONNECTIONS)
        self._arq_redis = redis or connect(settings.redis_url, max_connections=MAX_CONNECTIONS, tag=ARQ_TAG)
        self._directory = Directory(self._redis, settings.pool)
        self._outbound = Outbound(
            settings.webhook_networks, timeout_s=settings.webhook_timeout_s, max_connections=MAX_WEBHOOKS
        )
        self._courier = Courier(self._redis, self._outbound, settings)
        limits = Limits(Tenants(self._redis, cast(Pulse, _Waiting())), self._directory)
        self._batches = BatchRunner(self._redis, self._directory, limits, settings)
        self._attempt_s = settings.webhook_timeout_s + ATTEMPT_MARGIN_S
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        workers = [self._webhook_worker(), self._task_worker()]
        turns = (self._dispatch_webhooks, self._dispatch_batches)
        loops = [asyncio.create_task(self._forever(turn)) for turn in turns]
        loops += [asyncio.create_task(worker.main()) for worker in workers]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait({*loops, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {stopped}:
                ended.result()
            await asyncio.gather(*(worker.drain(self._settings.drain_timeout_s) for worker in workers))
        finally:
            for task in (*loops, stopped):
                task.cancel()
            await asyncio.gather(*loops, stopped, return_exceptions=True)
            await self._outbound.close()
            for client in {self._redis, self._arq_redis}:
                await client.aclose()

    def _webhook_worker(self) -> SteadyWorker:
        async def deliver(_: dict[str, Any], pool: str, delivery_id: str) -> None:
            await self._courier.attempt(pool, delivery_id)

        function = arq.func(deliver, name="deliver", timeout=self._attempt_s)  # type: ignore[arg-type]
        return SteadyWorker(
            self._arq_redis, WEBHOOK_QUEUE, functions=[function], max_jobs=MAX_WEBHOOKS, job_timeout=1
        )

    def _task_worker(self) -> SteadyWorker:
        """Apart from webhooks, so that endpoints that hang keep nothing else from running."""

        async def advance(_: dict[str, Any], batch_id: str) -> None:
            await self._batches.advance(batch_id)

        function = arq.func(advance, name="advance", timeout=TASK_S)  # type: ignore[arg-type]
        cron_jobs = sweeps(self._redis, self._directory, self._settings)
        return SteadyWorker(
            self._arq_redis,
            TASK_QUEUE,
            functions=[function],
            cron_jobs=cron_jobs,
            max_jobs=MAX_TASKS,
            job_timeout=TASK_S,
        )

    async def _dispatch_webhooks(self) -> None:
        client = arq_client(self._arq_redis, WEBHOOK_QUEUE)
        lease_ms = round((self._attempt_s + LEASE_MARGIN_S) * 1000)
        for pool in await self._directory.pools():
            deliveries = Deliveries(self._redis, pool, retention_ms=self._settings.webhook_retention_ms)
            try:
                await deliveries.take_notes()
                for delivery_id in await deliveries.due(lease_ms):
                    if not await enqueue(client, "deliver", pool, delivery_id, job_id=delivery_id):
                        await deliveries.postpone(delivery_id, await self._soon_ms())
            except ResponseError as exc:  # of this pool's keys: another's are not concerned
                log.warning("webhooks_not_dispatched", pool=pool, error=str(exc)[:80])

    async def _dispatch_batches(self) -> None:
        client, batches = arq_client(self._arq_redis, TASK_QUEUE), Batches(self._redis)
        for batch_id in await batches.due(round((TASK_S + LEASE_MARGIN_S) * 1000)):
            if not await enqueue(client, "advance", batch_id, job_id=batch_id):
                await batches.due_again(batch_id, await self._soon_ms())

    async def _soon_ms(self) -> int:
        """For work whose last turn is just being put away."""
        return await redis_now_ms(self._redis) + SOON_MS

    async def _forever(self, turn: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):  # the workers tell that Redis is away
                await turn()
            await asyncio.sleep(DISPATCH_S)


async def serve(settings: TasksSettings) -> None:
    """Until SIGTERM or SIGINT."""
    tasks = Tasks(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, tasks.stop)
    log.info("tasks_running", redis=redact_url(settings.redis_url))
    await tasks.run()


def run(settings: TasksSettings) -> int:
    asyncio.run(serve(settings))
    return 0

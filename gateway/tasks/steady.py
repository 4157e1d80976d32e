"""arq's worker, made to outlive what ends it: an outage of Redis, and the bookkeeping of one job.

Functions and arguments are written as MessagePack by msgspec. arq's default is pickle, which runs whatever
the writer of a key has put there.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import arq
import arq.worker
import msgspec
import structlog
from arq.connections import ArqRedis
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.lua import redis_now_ms
from headrace.keys import arq_id

POLL_S = 0.2
OUTAGE_PAUSE_S = 0.5
LOCK_MARGIN_S = 2.0
CLOCK_SLACK_S = 3600
EXPIRY_S = 86_400
KEEP_FAILED_S = 0  # nobody reads arq's results: what came of a task is in our own keys
log = structlog.get_logger("headrace.tasks")
# arq ends a task in one transaction with this key of its own, which on a cluster must have the others' slot.
arq.worker.abort_jobs_ss = f"arq:{arq_id('abort')}"


def encode(value: Any) -> bytes:
    """Exceptions, which arq stores as results, become their type's name."""
    return msgspec.msgpack.encode(value, enc_hook=lambda other: type(other).__name__)


def decode(raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw)


def arq_client(redis: Redis, queue: str) -> ArqRedis:
    """arq over the connections of `redis`, which have timeouts and repeat nothing by themselves."""
    return ArqRedis(
        redis.connection_pool, job_serializer=encode, job_deserializer=decode, default_queue_name=queue
    )


async def enqueue(client: ArqRedis, function: str, *args: Any, job_id: str) -> bool:
    """False: it is queued or running already. Any process may take it at once, whatever its clock says."""
    when = datetime.fromtimestamp(await redis_now_ms(client) / 1000 - CLOCK_SLACK_S, UTC)
    queued = await client.enqueue_job(
        function, *args, _job_id=arq_id(job_id), _defer_until=when, _expires=EXPIRY_S
    )
    return queued is not None


class SteadyWorker(arq.Worker):
    """Its `main` returns only when it is cancelled."""

    def __init__(self, redis: Redis, queue: str, **options: Any) -> None:
        super().__init__(
            redis_pool=arq_client(redis, queue),
            queue_name=queue,
            job_serializer=encode,
            job_deserializer=decode,
            handle_signals=False,
            keep_result=KEEP_FAILED_S,
            max_tries=1_000_000,  # attempts are counted in our own keys
            poll_delay=POLL_S,
            log_results=False,
            **options,
        )
        # A dead process's tasks wait for this lock: no longer than a task can take.
        self.in_progress_timeout_s -= 10 - LOCK_MARGIN_S
        self._away = False

    async def main(self) -> None:
        while True:
            try:
                await super().main()
            except (RedisError, OSError) as exc:
                self._tell_away(exc)
                await asyncio.sleep(OUTAGE_PAUSE_S)

    async def _poll_iteration(self) -> None:
        try:
            await super()._poll_iteration()
            self._away = False
        except (RedisError, OSError) as exc:
            self._tell_away(exc)
            await self._recount()
            await asyncio.sleep(OUTAGE_PAUSE_S)
        except Exception as exc:
            log.error("task_bookkeeping_failed", queue=self.queue_name, error=type(exc).__name__)
            await self._recount()

    async def _recount(self) -> None:
        """Slots that were taken when the failure came belong to nobody: count those of running tasks anew."""
        await asyncio.sleep(0)  # tasks that have ended give theirs back first
        for task in [task for task in self.tasks.values() if task.done() and not task.cancelled()]:
            task.exception()  # of the same outage; its lock runs out and it is run again
        self.tasks = {job_id: task for job_id, task in self.tasks.items() if not task.done()}
        self.job_counter = len(self.tasks)
        self.sem = asyncio.BoundedSemaphore(self.max_jobs + 1)
        for _ in self.tasks:
            await self.sem.acquire()

    def _tell_away(self, exc: Exception) -> None:
        if not self._away:
            log.warning("redis_away", queue=self.queue_name, error=type(exc).__name__)
        self._away = True

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and lets running tasks end; the others are run again elsewhere."""
        self.allow_pick_jobs = False
        tasks = set(self.tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

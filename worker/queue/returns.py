"""How jobs go back to the queue: with all they have said in their logs, and no attempt used up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from headrace.script_types import HeldJob
from headrace.scripts import Scripts
from worker.queue.lease import LeaseKeeper
from worker.queue.publisher import Publisher
from worker.queue.running import RunningJobs

log = structlog.get_logger("headrace.returns")

MAKE_GOOD_S, MAKE_GOOD_RETRY_S = 60.0, 0.1  # how long and how often a worker that lives tries to say so


class Returns:
    """Gives back jobs of one worker. Its callers stop them first, or have lost them."""

    def __init__(self, scripts: Scripts, worker_id: str, publisher: Publisher, leases: LeaseKeeper) -> None:
        self._scripts = scripts
        self._worker_id = worker_id
        self._publisher = publisher
        self._leases = leases

    async def release(self, held: Sequence[HeldJob]) -> None:
        """Raises RedisError or OSError when Redis cannot be reached: their leases end then."""
        try:
            await self._publisher.flush()
            await self._scripts.release(self._worker_id, held)
        finally:
            for job in held:
                self._leases.drop(job.job_id)

    async def release_displaced(self, jobs: RunningJobs, job_ids: Sequence[str]) -> None:
        """What waits here behind higher classes may go on at once on a worker that has room."""
        held = jobs.let_go(job_ids)
        if not held:
            return
        log.info("displaced_jobs_released", jobs=len(held))
        with suppress(RedisError, OSError):
            await self.release(held)

    async def make_good(self, lost: Sequence[HeldJob]) -> None:
        """This worker lives: what nobody took meanwhile goes back, and no death is held against the rest."""
        end_s = time.monotonic() + MAKE_GOOD_S
        while time.monotonic() < end_s:
            try:
                await self._scripts.release(self._worker_id, lost)
                await self._scripts.pardon(self._worker_id, lost)
                return
            except (RedisError, OSError):
                await asyncio.sleep(MAKE_GOOD_RETRY_S)

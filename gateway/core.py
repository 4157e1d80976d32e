"""The gateway as its handlers see it: settings, the store behind it, its metrics, and work left for later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import structlog
from litestar.di import NamedDependency
from redis.exceptions import RedisError

from gateway.directory import Directory, Pool
from gateway.disconnect import OnDisconnect
from gateway.errors import describe
from gateway.limits import Limits
from gateway.metrics import Metrics
from gateway.pulse import Pulse
from gateway.store import JobRef, NewJob, Store
from gateway.tracing import current_traceparent
from gateway.waiting import Waiting
from headrace.config import GatewaySettings
from headrace.messages import Event

CANCEL_RETRY_S = 1.0
CANCEL_ATTEMPTS = 60
UNSUBSCRIBE_S = 0.1
log = structlog.get_logger("headrace.gateway")


class Gateway:
    """One for each app. Holds no state of a job: that is all in Redis."""

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        directory: Directory,
        metrics: Metrics,
        pulse: Pulse,
        limits: Limits,
        waiting: Waiting,
    ) -> None:
        self.settings = settings
        self.store = store
        self.directory = directory
        self.metrics = metrics
        self.pulse = pulse
        self.limits = limits
        self.waiting = waiting
        self.started_s = int(time.time())
        self._later: set[asyncio.Task[None]] = set()

    async def submit_all(self, jobs: Sequence[NewJob]) -> list[JobRef]:
        """Submits one request's jobs, all or none. Raises HeadraceError, HttpError, RedisError."""
        await self.limits.admit(jobs)
        refs: list[JobRef] = []
        try:
            for job in jobs:
                refs.append(await self._submit(job))
        except Exception:
            self.abandon(refs)
            raise
        return refs

    async def route(self, model: str | None) -> Pool:
        return await self.pulse.guard(self.directory.route(model))

    async def submit(self, job: NewJob) -> JobRef:
        """As `submit_all`."""
        await self.limits.admit([job])
        return await self._submit(job)

    async def submit_fork(self, job: NewJob, events: Sequence[Event], *, prompt_tokens: int) -> JobRef:
        """As `submit`, for a job that has said `events` already."""
        await self.limits.admit([job])
        return await self.pulse.guard(self.store.fork(job, events, prompt_tokens=prompt_tokens))

    async def _submit(self, job: NewJob) -> JobRef:
        job = _traced(job)
        try:
            return await self.pulse.guard(self.store.submit(job))
        except (RedisError, OSError):
            # The reply is lost, the job perhaps not. Where nobody knows its id, it must not run.
            if job.idem_key is None and not job.id_known:
                self._spawn(self._cancel_unknown(job.ref))
            raise

    def client_left(self, refs: Sequence[JobRef], policy: OnDisconnect) -> None:
        self.metrics.left.inc()
        self.nobody_waits(refs, policy)

    def nobody_waits(self, refs: Sequence[JobRef], policy: OnDisconnect) -> None:
        if policy.grace_s is not None:
            self._spawn(self._cancel_unless_followed(refs, policy.grace_s))

    def abandon(self, refs: Sequence[JobRef]) -> None:
        """Cancels jobs nobody waits for any more; ended ones are left as they are."""
        if refs:
            self._spawn(self._cancel(refs))

    def report(self, exc: Exception) -> None:
        """Counts a failure told inside a stream, and logs it if it is ours."""
        status, body = describe(exc)
        self.metrics.count_error(body.error.code)
        if status >= 500 and status != 503:
            log.warning("stream_failed", code=body.error.code, error=type(exc).__name__)

    async def close(self) -> None:
        """Gives what is left for later a moment, then drops it."""
        if self._later:
            await asyncio.wait(self._later, timeout=1.0)
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _cancel_unless_followed(self, refs: Sequence[JobRef], grace_s: float) -> None:
        await asyncio.sleep(max(grace_s, UNSUBSCRIBE_S))
        lonely = [ref for ref in refs if not await self._followed(ref)]
        await self._cancel(lonely)

    async def _followed(self, ref: JobRef) -> bool:
        try:
            return await self.store.followers(ref) > 0
        except (RedisError, OSError):
            return False

    async def _cancel(self, refs: Sequence[JobRef]) -> None:
        for _ in range(CANCEL_ATTEMPTS):
            try:
                for ref in refs:
                    await self.store.cancel(ref)
                return
            except (RedisError, OSError):
                await asyncio.sleep(CANCEL_RETRY_S)
        log.error("cancel_given_up", jobs=len(refs))

    async def _cancel_unknown(self, ref: JobRef) -> None:
        # A frozen server may carry out the lost call after this one, and `submit` drops older cancel flags.
        await self._cancel([ref])
        await asyncio.sleep(CANCEL_RETRY_S)
        await self._cancel([ref])


def _traced(job: NewJob) -> NewJob:
    """The caller's own `traceparent` field goes before its header."""
    current = current_traceparent()
    if current is None or "traceparent" in job.fields:
        return job
    return replace(job, fields={**job.fields, "traceparent": current})


GatewayHere = NamedDependency[Gateway]

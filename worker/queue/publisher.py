"""Everything a worker says leaves here: one `emit` in flight at a time, in order, for the whole batch.

While one call is under way the next steps' events gather; a slow Redis makes larger calls, not more of them.
A call whose reply is lost is sent again as it was: `emit` knows by sequence number and epoch what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog
from redis.exceptions import RedisError

from headrace.script_types import EmitItem, EmitOutcome
from headrace.scripts import Scripts

log = structlog.get_logger("headrace.publisher")

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0
MAX_ITEMS_A_CALL = 64  # bounds the time one script holds the server


class Publisher:
    """Owns the events that Redis has not acknowledged. `on_outcomes` is called after each call."""

    def __init__(
        self,
        scripts: Scripts,
        *,
        retention_ms: int,
        on_outcomes: Callable[[Sequence[EmitItem], Sequence[EmitOutcome]], None],
    ) -> None:
        self._scripts = scripts
        self._retention_ms = retention_ms
        self._on_outcomes = on_outcomes
        self._waiting: dict[str, EmitItem] = {}
        self._in_flight: dict[str, EmitItem] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def backlog_events(self) -> int:
        parts = (self._waiting, self._in_flight)
        return sum(len(item.events) for part in parts for item in list(part.values()))

    def put(self, items: Sequence[EmitItem]) -> None:
        """Queues one step's items; a job's events keep their order and join those that wait."""
        for item in items:
            before = self._waiting.get(item.job_id)
            self._waiting[item.job_id] = item if before is None else _joined(before, item)
        if items:
            self._idle.clear()
            self._wake.set()

    def forget(self, job_id: str) -> None:
        """Drops what waits for a job that is no longer ours."""
        self._waiting.pop(job_id, None)

    async def flush(self) -> None:
        """Returns when Redis has acknowledged everything put so far."""
        await self._idle.wait()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = [self._waiting.pop(job_id) for job_id in list(self._waiting)[:MAX_ITEMS_A_CALL]]
                self._in_flight = {item.job_id: item for item in batch}
                outcomes = await self._emit_until_acknowledged(batch)
                self._in_flight = {}
                self._on_outcomes(batch, outcomes)
            self._idle.set()

    async def _emit_until_acknowledged(self, batch: list[EmitItem]) -> list[EmitOutcome]:
        delay_s, failing = RETRY_FIRST_S, False
        while True:
            try:
                outcomes = await self._scripts.emit(batch, retention_ms=self._retention_ms)
            except (RedisError, OSError) as error:
                if not failing:
                    log.warning("emit_failing", error=type(error).__name__, jobs=len(batch))
                failing = True
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, RETRY_MOST_S)
                continue
            if failing:
                log.info("emit_recovered", jobs=len(batch))
            return outcomes


def _joined(first: EmitItem, second: EmitItem) -> EmitItem:
    if second.force:
        return second  # the end of a damaged log stands alone
    return msgspec.structs.replace(second, events=[*first.events, *second.events])

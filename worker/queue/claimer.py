"""Claims at every iteration what the engine can admit now, and blocks on Redis only in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog
from redis.exceptions import RedisError

from headrace.connect import retry_pause_s
from headrace.messages import CLASSES
from headrace.script_types import HeldJob
from headrace.scripts import Scripts
from worker.queue.control import EntryWatcher
from worker.queue.intake import Admitted, Intake

log = structlog.get_logger("headrace.claim")

RETRY_MOST_S = 0.5


class Claimer:
    """Runs `pick` and `claim` whenever there may be both work and room.

    `room()` gives, for each class from the highest, the requests and the tokens the engine can admit beyond
    those already on their way to it: a high one may take the place of a low one. `held()` are the jobs under
    this worker's leases, whatever becomes of them. `give_back` empties the worker: jobs that may have ended
    another one wait for it, to run apart.
    """

    def __init__(
        self,
        scripts: Scripts,
        intake: Intake,
        watcher: EntryWatcher,
        *,
        worker_id: str,
        lease_ms: int,
        room: Callable[[], Sequence[tuple[int, int]]],
        take: Callable[[Admitted], None],
        held: Callable[[], Sequence[HeldJob]],
        holds_nothing: Callable[[], bool],
        give_back: Callable[[], Awaitable[None]],
    ) -> None:
        self._scripts = scripts
        self._intake = intake
        self._watcher = watcher
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._room = room
        self._take = take
        self._held = held
        self._holds_nothing = holds_nothing
        self._give_back = give_back
        self._last_ids = dict.fromkeys(CLASSES, "0-0")
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        self._stopping = False
        self._missed_reply = False
        self.waiting = 0  # sorted entries that nobody has claimed, as of the last look

    def stop(self) -> None:
        """`run` ends behind the round under way: what one cut short has picked waits for its lease to end."""
        self._stopping = True
        self._wake.set()

    def wake(self) -> None:
        """Something has changed: an entry, room in the engine, a job given back."""
        self._wake.set()

    async def run(self) -> None:
        failures = 0
        while not self._stopping:
            self._wake.clear()
            try:
                more = await self._claim_once()
                if failures:
                    log.info("claim_recovered")
                failures = 0
            except (RedisError, OSError) as error:
                if not failures:
                    log.warning("claim_failing", error=f"{type(error).__name__}: {error}"[:200])
                failures, more, self._missed_reply = failures + 1, True, True
                await asyncio.sleep(retry_pause_s(failures, RETRY_MOST_S))
            self._looked.set()
            if not more and not self._stopping:
                await self._wake.wait()

    async def watch(self) -> None:
        """Wakes `run` for new entries, and once a second for leases that have run out."""
        while True:
            await self._looked.wait()
            self._looked.clear()
            await self._watcher.wait(self._last_ids)
            self._wake.set()

    async def _claim_once(self) -> bool:
        """One pick and claim. Returns whether another may get more right now."""
        num_classes, requests, tokens = self._widest_room()
        picked = await self._scripts.pick(
            self._worker_id,
            requests,
            budget_tokens=tokens,
            lease_ms=self._lease_ms,
            num_classes=num_classes,
            holds_nothing=self._holds_nothing(),
            known=[job.member for job in self._held()] if self._missed_reply else None,
        )
        self._last_ids = picked.last_ids
        self.waiting = picked.waiting
        if picked.on_duty:
            await self._give_back()
            return True
        if picked.entries:
            for admitted in await self._intake.admit(picked.entries, apart=picked.apart):
                self._take(admitted)
        room_left = self._widest_room()[1] > 0
        self._missed_reply = self._missed_reply and not room_left  # with none, more may be under this lease
        return bool(picked.entries) and room_left and picked.waiting > 0

    def _widest_room(self) -> tuple[int, int, int]:
        """Classes, requests and tokens: for all classes if there is room, else for the higher ones alone."""
        rooms = self._room()
        for num_classes in range(len(rooms), 0, -1):
            requests, tokens = rooms[num_classes - 1]
            if requests > 0:
                return num_classes, requests, tokens
        return len(rooms), 0, 0

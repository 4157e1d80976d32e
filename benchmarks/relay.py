"""Workers one after the other: while one serves the next is loaded and frozen, to go on where it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path

from benchmarks.serving import Serving, serving
from headrace.embedded import EmbeddedRedis
from headrace.keys import Keys

AWAKE_MS = 9_000  # left of a card that was written a moment ago


class Relay:
    """Starts workers on `stack`, which ends them."""

    def __init__(
        self,
        stack: AsyncExitStack,
        server: EmbeddedRedis,
        pool: str,
        settings: Mapping[str, str | int],
        folder: Path,
    ) -> None:
        self._stack, self._server, self._pool = stack, server, pool
        self._settings, self._folder = settings, folder
        self._started = 0
        self._serving: Serving | None = None
        self._frozen: Serving | None = None

    async def prepare(self) -> None:
        """Returns when one worker serves and another waits."""
        if self._serving is None:
            self._serving = await self._start()
        self._frozen = await self._start()
        self._frozen.process.send_signal(signal.SIGSTOP)

    async def _start(self) -> Serving:
        self._started += 1
        name = f"w{self._started}"
        worker = await self._stack.enter_async_context(
            serving(
                self._server, self._pool, {**self._settings, "worker_id": name}, self._folder / f"{name}.log"
            )
        )
        self._stack.callback(worker.process.send_signal, signal.SIGCONT)
        return worker

    def kill(self) -> None:
        """SIGKILL for the one that serves; the next goes on."""
        first, second = self._both()
        first.process.kill()
        first.process.wait()
        second.process.send_signal(signal.SIGCONT)
        self._serving, self._frozen = second, None

    async def hand_over(self) -> float:
        """SIGTERM for the one that serves, beside one that is awake. When that was, s (monotonic)."""
        first, second = self._both()
        second.process.send_signal(signal.SIGCONT)
        card = Keys(self._pool).worker(second.worker_id)
        while await second.redis.pttl(card) < AWAKE_MS:  # noqa: ASYNC110 - it is another process's doing
            await asyncio.sleep(0.01)
        told_s = time.monotonic()
        first.process.terminate()
        self._serving, self._frozen = second, None
        return told_s

    def claimed_s(self, job_id: str) -> float:
        """When the one that serves last claimed a job, s since the epoch, by its log in JSON."""
        if self._serving is None:
            raise RuntimeError("nobody serves")
        lines = [json.loads(line) for line in self._serving.log.read_text().splitlines() if job_id in line]
        claims = [line["timestamp"] for line in lines if line["event"] == "job_claimed"]
        return datetime.fromisoformat(claims[-1]).timestamp()

    def _both(self) -> tuple[Serving, Serving]:
        if self._serving is None or self._frozen is None:
            raise RuntimeError("nothing is prepared")
        return self._serving, self._frozen

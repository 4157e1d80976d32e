"""A real worker process, and a Redis server of its own, for the length of a measurement."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis

from headrace.connect import connect
from headrace.embedded import EmbeddedRedis
from headrace.keys import Keys
from headrace.processes import start_child, stop_child

START_TIMEOUT_S = 300.0
_CARD_QUIET_S = 2.5  # longer than the time between two writings of a card
_CARD_TIMEOUT_S = 15.0
T = TypeVar("T")


class ServingError(Exception):
    """The worker did not start or has ended; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker that answers."""

    redis_url: str
    pool: str
    worker_id: str
    process: subprocess.Popen[bytes]
    redis_pid: int | None
    redis: Redis
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def pids(self) -> set[int]:
        """The processes that a measurement pays for, the driver's included."""
        return {self.pid, os.getpid(), *([self.redis_pid] if self.redis_pid else [])}

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises ServingError as soon as the worker has ended."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                self.check()
                await asyncio.wait({task}, timeout=0.5)
            return task.result()
        finally:
            task.cancel()

    def check(self) -> None:
        """Raises ServingError when the worker has ended."""
        if self.process.poll() is not None:
            raise ServingError(f"the worker has ended (status {self.process.poll()}); {_tail(self.log)}")

    async def card(self) -> dict[str, float]:
        """The numbers on the worker's card."""
        fields = await self.redis.hgetall(Keys(self.pool).worker(self.worker_id))  # type: ignore[misc]
        return {
            name.decode(): number for name, value in fields.items() if (number := _number(value)) is not None
        }

    async def settled_card(self) -> dict[str, float]:
        """The card once it tells of the last step: it is written every few seconds only."""
        previous, waited_s = await self.card(), 0.0
        while waited_s < _CARD_TIMEOUT_S:
            await asyncio.sleep(_CARD_QUIET_S)
            waited_s += _CARD_QUIET_S
            card = await self.card()
            if card.get("step") == previous.get("step"):
                return card
            previous = card
        return previous


@contextmanager
def own_redis() -> Iterator[EmbeddedRedis]:
    """A fresh server in a folder that goes with it."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder,
        EmbeddedRedis(Path(folder)) as server,
    ):
        yield server


@asynccontextmanager
async def serving(
    server: EmbeddedRedis, pool: str, settings: Mapping[str, str | int], log: Path
) -> AsyncIterator[Serving]:
    """`python -m worker` with HEADRACE_* `settings`, from when it has its card. Raises ServingError."""
    worker_id = str(settings.get("worker_id", f"bench-{os.getpid()}"))
    own = {"REDIS_URL": server.url, "POOL": pool, "WORKER_ID": worker_id, **settings}
    env = {**os.environ, **{f"HEADRACE_{name.upper()}": str(value) for name, value in own.items()}}
    redis = connect(server.url, max_connections=4)
    with log.open("wb") as output:
        process = start_child([sys.executable, "-m", "worker"], env=env, output=output)
    try:
        running = Serving(server.url, pool, worker_id, process, server.pid, redis, log)
        await _until_ready(running)
        yield running
    finally:
        await asyncio.to_thread(stop_child, process, timeout_s=20.0)
        await redis.aclose()


async def _until_ready(running: Serving) -> None:
    waited_s = 0.0
    while not await running.redis.exists(Keys(running.pool).worker(running.worker_id)):
        running.check()
        if waited_s > START_TIMEOUT_S:
            raise ServingError(
                f"the worker did not get ready in {START_TIMEOUT_S:.0f} s; {_tail(running.log)}"
            )
        await asyncio.sleep(0.1)
        waited_s += 0.1


def _tail(log: Path) -> str:
    return "\n".join([f"{log}:", *log.read_text(errors="replace").splitlines()[-15:]])


def _number(value: bytes) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None

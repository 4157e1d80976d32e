"""What is killed, frozen and cut off while the jobs run, in an order drawn from one seed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import redis

from benchmarks.processes import LEASE_MS, Fleet, Gateways, Server


class Storm:
    """Carries out a seeded list of faults, one after the other; freezes thaw in the background.

    `counts`: how many of each of "kill" and "freeze" (of workers), "storm" (of killed connections), "redis"
    and "gateway" (kills). `cut`: share of Redis's file that a kill takes along.
    """

    def __init__(
        self,
        counts: dict[str, int],
        server: Server,
        fleet: Fleet,
        gateways: Gateways,
        *,
        seed: int,
        pause_s: float,
        cut: float,
    ) -> None:
        self._rng = random.Random(seed)
        self._server, self._fleet, self._gateways = server, fleet, gateways
        self._pause_s, self._cut = pause_s, cut
        self._frozen: set[int] = set()
        self._thawing: set[asyncio.Task[None]] = set()
        self._plan = [name for name, count in counts.items() for _ in range(count)]
        self._rng.shuffle(self._plan)
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "storm": self._connections,
            "redis": self._redis,
            "gateway": self._gateway,
        }
        for name in self._plan:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._pause_s)
            self._fleet.replace_dead()
            await actions[name]()
            self.done[name] += 1
        await asyncio.gather(*self._thawing)

    def _choose(self) -> subprocess.Popen[bytes]:
        awake = [w for w in self._fleet.workers if w.pid not in self._frozen]
        return self._rng.choice(awake or self._fleet.workers)

    async def _kill(self) -> None:
        self._fleet.kill(self._choose())

    async def _freeze(self) -> None:
        worker = self._choose()
        worker.send_signal(signal.SIGSTOP)
        self._frozen.add(worker.pid)
        task = asyncio.create_task(self._thaw(worker, self._rng.uniform(1.2, 2.5) * LEASE_MS / 1000))
        self._thawing.add(task)
        task.add_done_callback(self._thawing.discard)

    async def _thaw(self, worker: subprocess.Popen[bytes], after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._frozen.discard(worker.pid)
        worker.send_signal(signal.SIGCONT)

    async def _gateway(self) -> None:
        await asyncio.to_thread(self._gateways.wait_ready)  # as behind a balancer: never all at once
        self._gateways.kill(self._rng.choice(self._gateways.ports))

    async def _connections(self) -> None:
        for _ in range(5):
            with suppress(redis.RedisError), self._server.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
                client.client_kill_filter(_type="pubsub", skipme=True)
            await asyncio.sleep(0.05)

    async def _redis(self) -> None:
        self._server.kill()
        if self._cut:
            self._server.cut(self._cut)
        await asyncio.sleep(self._rng.uniform(0.1, 1.0))
        await asyncio.to_thread(self._server.start)

"""The disturbances of `headrace chaos`, drawn from one seed and carried out one after the other."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

FREEZE_S = (1.0, 8.0)
PAUSE_MS = (200, 2500)
COMMAND_S = 60.0
STORM, STORM_S = 5, 0.05  # so many waves of killed connections, so far apart


class Fire:
    """Cuts connections, forgets scripts, pauses Redis, freezes and kills `pids`, runs `commands`.

    `done` and `failed` count by name what was carried out and what was refused.
    """

    def __init__(
        self, redis: Redis, pids: Sequence[int], commands: Sequence[str], *, seed: int, pause_s: float
    ) -> None:
        self._redis, self._pids = redis, list(pids)
        self._commands = [shlex.split(command) for command in commands]
        self._rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self._pause_s = pause_s
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    async def run(self) -> None:
        """Until it is cancelled; what is frozen then thaws."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._pause_s)
            name, act = self._rng.choice(self._choices())
            try:
                await act()
                self.done[name] += 1
            except (RedisError, OSError, TimeoutError) as error:
                self.failed[f"{name}: {type(error).__name__}"] += 1

    def _choices(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        choices: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("connections", self._cut_connections),
            ("scripts", self._forget_scripts),
            ("pause", self._pause),
        ]
        if self._pids:
            choices += [("freeze", self._freeze), ("kill", self._kill)]
        if self._commands:
            choices.append(("exec", self._execute))
        return choices

    async def _cut_connections(self) -> None:
        for _ in range(STORM):
            for kind in ("normal", "pubsub"):
                await self._redis.client_kill_filter(_type=kind, skipme=True)
            await asyncio.sleep(STORM_S)

    async def _forget_scripts(self) -> None:
        await self._redis.script_flush()

    async def _pause(self) -> None:
        """Redis answers nobody for a while, as in a long fork or a failing disk."""
        await self._redis.client_pause(self._rng.randint(*PAUSE_MS))

    async def _freeze(self) -> None:
        pid = self._rng.choice(self._pids)
        self._send(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(*FREEZE_S))
        finally:
            self._send(pid, signal.SIGCONT)

    async def _kill(self) -> None:
        pid = self._rng.choice(self._pids)
        self._pids.remove(pid)
        self._send(pid, signal.SIGKILL)

    def _send(self, pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            with suppress(ValueError):
                self._pids.remove(pid)
            raise

    async def _execute(self) -> None:
        command = self._rng.choice(self._commands)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            raise
        if status:
            raise OSError(f"{command[0]} ended with {status}")

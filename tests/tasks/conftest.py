"""The tasks process in this loop or as a process of its own, and an endpoint that receives webhooks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio

from gateway.tasks.service import Tasks
from headrace.config import TasksSettings
from headrace.connect import connect
from headrace.keys import Keys
from headrace.messages import Choice, Delta, End, Event, Finish, Result, Usage
from headrace.script_types import EmitItem, Final
from headrace.scripts import Scripts

POOL = "smollm2"
WAIT_S = 20.0


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Endpoint:
    """An HTTP/1.1 server that answers what the test says: raw bytes, or None to say nothing for ever."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    replies: list[bytes | None] = field(default_factory=list)  # for the next requests; then 200
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def wait_for(self, count: int) -> list[Received]:
        async with asyncio.timeout(WAIT_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.received) >= count)
        return self.received

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (h.partition(": ") for h in head[1:] if h)}
            body = await reader.readexactly(int(headers["content-length"]))
            reply = self.replies.pop(0) if self.replies else status(200)
            async with self.arrived:
                self.received.append(Received(head[0].split()[1], headers, body))
                self.arrived.notify_all()
            if reply is None:
                await reader.read()
            else:
                writer.write(reply)
                await writer.drain()
        writer.close()


def status(code: int, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {code} x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def listening() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(endpoint.handle(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with listening() as found:
        yield found


@pytest.fixture
async def endpoints() -> AsyncIterator[Callable[[], Awaitable[Endpoint]]]:
    async with AsyncExitStack() as stack:
        yield lambda: stack.enter_async_context(listening())


@pytest.fixture
async def db(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


SETTINGS = {
    "webhook_networks": ("127.0.0.0/8",),
    "webhook_timeout_s": 2.0,
    "webhook_backoff_s": 0.05,
    "drain_timeout_s": 0.2,
}


@pytest.fixture
async def start_tasks(redis_url: str) -> AsyncIterator[Callable[..., Awaitable[Tasks]]]:
    """Starts the tasks process's loops here; all of them stop with the test."""
    running: list[tuple[Tasks, asyncio.Task[None]]] = []

    async def start(**changes: Any) -> Tasks:
        tasks = Tasks(TasksSettings(redis_url=redis_url, **{**SETTINGS, **changes}))
        running.append((tasks, asyncio.create_task(tasks.run())))
        return tasks

    yield start
    for tasks, task in running:
        tasks.stop()
        await task


@pytest.fixture
def spawn_tasks(redis_url: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`python -m gateway.tasks` as a process."""
    processes: list[subprocess.Popen[bytes]] = []

    def spawn(**changes: Any) -> subprocess.Popen[bytes]:
        settings = {**SETTINGS, "redis_url": redis_url, **changes}
        env = {
            f"HEADRACE_{name.upper()}": ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in settings.items()
        }
        command = [sys.executable, "-m", "gateway.tasks"]
        processes.append(subprocess.Popen(command, env=os.environ | env))
        return processes[-1]

    yield spawn
    for process in processes:
        process.kill()
        process.wait()


class Jobs:
    """Jobs that run to their end at once, through the real scripts."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.keys = Keys(POOL)
        self.scripts = Scripts(client, self.keys)

    async def finish(self, job_id: str, webhook: str, text: str = "hello", tenant: str = "default") -> None:
        fields = {"prompt": "x", "webhook": webhook}
        await self.scripts.submit("normal", job_id, fields, tenant=tenant)
        picked = await self.scripts.pick("w1", 1, budget_tokens=10**6, lease_ms=60_000)
        (entry,) = picked.entries
        row = (entry.job_class, entry.entry_id, job_id, None)
        (claimed,) = await self.scripts.claim("w1", [row], lease_ms=60_000, max_attempts=3)
        usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
        events: list[Event] = [
            Delta(seq=1, text=text, ids=[1]),
            Finish(seq=2, reason="stop"),
            End(seq=3, status="done"),
        ]
        result = Result(choices=[Choice(index=0, text=text, ids=[1], finish_reason="stop")])
        final = Final("done", usage, result)
        item = EmitItem(job_id, entry.job_class, entry.entry_id, claimed.epoch, events, final)
        assert [outcome.kind for outcome in await self.scripts.emit([item])] == ["ok"]


@pytest.fixture
def jobs(db: redis.asyncio.Redis) -> Jobs:
    return Jobs(db)


@pytest.fixture
def kit() -> Any:
    """This module's helpers, for tests that cannot import a conftest."""
    return sys.modules[__name__]


async def eventually(condition: Callable[[], Awaitable[Any]], timeout_s: float = WAIT_S) -> Any:
    """Polls until `condition` is truthy; the test fails when it never is."""
    async with asyncio.timeout(timeout_s):
        while True:
            if value := await condition():
                return value
            await asyncio.sleep(0.02)

"""A server that runs for the length of a measurement: over HTTP, or in a process that we talk to directly."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import msgspec

from benchmarks.load import LoadError
from benchmarks.peers.client import complete
from benchmarks.peers.processes import end_rest, tree
from benchmarks.peers.work import Answer, PeerRequest
from benchmarks.serving import own_redis, serving
from headrace.processes import start_child, stop_child

START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 900.0
LINE_LIMIT_BYTES = 2**26
POOL = "bench"
DRIVERS = Path(__file__).with_name("drivers")


Settings = Mapping[str, str | int]


class Session(Protocol):
    """A server that is ready."""

    roots: Mapping[str, int]  # the first process of each of its trees, by what it does
    settings: Settings  # what bears on its figures, as far as it is known

    async def run(self, requests: Sequence[PeerRequest]) -> list[Answer]: ...


Start = Callable[[Path], AbstractAsyncContextManager[Session]]  # takes the file of its log


class HttpSession:
    """An OpenAI-style server. `extra` goes into each request's body."""

    def __init__(
        self, url: str, roots: Mapping[str, int], settings: Settings, extra: Mapping[str, Any]
    ) -> None:
        self.roots = roots
        self.settings = settings
        self._url = url
        self._extra = extra

    async def run(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        return await complete(self._url, self._extra, requests)


class _Ready(msgspec.Struct):
    settings: dict[str, str | int]


class DriverSession:
    """One of `drivers/` in the peer's own environment. Lines of JSON go both ways."""

    def __init__(
        self, process: Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.roots: Mapping[str, int] = {"engine": process.pid}
        self.settings: Settings = {}
        self._reader = reader
        self._writer = writer

    async def run(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        self._writer.write(msgspec.json.encode(requests) + b"\n")
        return msgspec.json.decode(await self.line(RUN_TIMEOUT_S), type=list[Answer])

    async def ready(self, timeout_s: float) -> None:
        """Raises LoadError when it does not get there."""
        self.settings = msgspec.json.decode(await self.line(timeout_s), type=_Ready).settings

    async def line(self, timeout_s: float) -> bytes:
        """Raises LoadError when the driver has ended, or says nothing for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._reader.readline()
        except TimeoutError:
            raise LoadError(f"no answer within {timeout_s:g} s; its log says what it did") from None
        if not found:
            raise LoadError("the process has ended; its log says why")
        return found


def headrace(settings: Settings) -> Start:
    """Redis, worker and gateway, as users run them."""

    @asynccontextmanager
    async def start(log: Path) -> AsyncIterator[Session]:
        port = free_port()
        with own_redis() as server:
            async with serving(server, POOL, settings, log) as worker:
                env = {"HEADRACE_REDIS_URL": server.url, "HEADRACE_POOL": POOL, "HEADRACE_PORT": str(port)}
                command = [sys.executable, "-m", "gateway"]
                async with _served(command, f"http://127.0.0.1:{port}/readyz", env, log) as gateway:
                    roots = {"worker": worker.pid, "gateway": gateway.pid}
                    if server.pid:
                        roots["redis"] = server.pid
                    yield HttpSession(f"http://127.0.0.1:{port}", roots, settings, {"model": POOL})

    return start


def llama(
    program: Path, model: Path, threads: int, kv_tokens: int, guesses: int = 0, slots: int = 32
) -> Start:
    """llama.cpp's server, its prompt cache off and its chain of samplers reduced to the greedy choice.

    With `guesses` it guesses so many tokens ahead from what stood behind the last three before.
    """
    settings: Settings = {"kv_tokens": kv_tokens, "kv_cache": "f16", "slots": slots, "threads": threads}
    settings = {**settings, "guesses": guesses}

    @asynccontextmanager
    async def start(log: Path) -> AsyncIterator[Session]:
        port = free_port()
        command: list[str] = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", str(threads), "-tb", str(threads), "-np", str(slots), "-c", str(kv_tokens)]
        command += ["--cache-ram", "0", "--no-webui", "--threads-http", "1"]
        if guesses:
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
            command += ["--spec-ngram-simple-size-m", str(guesses)]
        extra = {"cache_prompt": False, "top_k": 1, "samplers": ["top_k"]}
        async with _served(command, f"http://127.0.0.1:{port}/health", {}, log) as process:
            yield HttpSession(f"http://127.0.0.1:{port}", {"server": process.pid}, settings, extra)

    return start


def driver(
    python: Path | str,
    script: str,
    before: Sequence[str],
    after: Sequence[str],
    env: Mapping[str, str],
    start_timeout_s: float = START_TIMEOUT_S,
) -> Start:
    """`script` of drivers/ with `before`, the number of its socket, `after`."""

    @asynccontextmanager
    async def start(log: Path) -> AsyncIterator[Session]:
        ours, theirs = socket.socketpair()
        command = [str(python), str(DRIVERS / script), *before, str(theirs.fileno()), *after]
        with log.open("ab") as output, theirs:
            process = start_child(
                command, env={**os.environ, **env}, output=output, pass_fds=[theirs.fileno()]
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT_BYTES)
            session = DriverSession(process, reader, writer)
            await session.ready(start_timeout_s)
            yield session
            writer.close()
        finally:
            whole = tree({process.pid})
            await asyncio.to_thread(stop_child, process, timeout_s=20.0)
            end_rest(whole)  # an engine of several processes may outlive its first

    return start


@asynccontextmanager
async def _served(
    command: Sequence[str], ready_url: str, env: Mapping[str, str], log: Path
) -> AsyncIterator[Popen[bytes]]:
    with log.open("ab") as output:
        process = start_child(command, env={**os.environ, **env}, output=output)
    try:
        await _until_ready(process, ready_url)
        yield process
    finally:
        await asyncio.to_thread(stop_child, process, timeout_s=20.0)


async def _until_ready(process: Popen[bytes], url: str) -> None:
    deadline = time.perf_counter() + START_TIMEOUT_S
    while not await _answers(url):
        if process.poll() is not None or time.perf_counter() > deadline:
            raise LoadError("the server did not get ready; its log says why")
        await asyncio.sleep(0.05)


async def _answers(url: str) -> bool:
    """Whether a GET gives 200. The first line tells."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(name, int(port))
            writer.write(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            status = await reader.readline()
            writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200" in status


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port

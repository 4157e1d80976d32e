"""Both sides of a gateway under load, each in a process of its own: who says the tokens, and who reads them.

Every token's text is the time at which it was handed to Redis, so whoever reads it can tell how long it took.
"""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

from benchmarks.figures import percentile
from benchmarks.load import LoadError
from headrace.connect import connect
from headrace.keys import POOLS, Keys
from headrace.messages import Delta
from headrace.script_types import Claimed, EmitItem, Entry
from headrace.scripts import Scripts

POOL = "bench"
TOKENS_PER_S = 20.0
SLOTS = 32  # jobs of one worker, whose tokens come with one `emit`
SAMPLED = 10  # of so many streams one is timed, lest the reader be what is measured
WARM_UP_S = 2.0
READ_BYTES = 262_144
STAMP = re.compile(rb'"content":"(\d+) "')
PUBLISHED = re.compile(rb'"text":"(\d+) "')
TOKEN = b'"content":"'


@dataclass(slots=True)
class Speaking:
    """One claimed job, whose tokens are times."""

    entry: Entry
    claimed: Claimed
    seq: int = 0

    def say(self) -> EmitItem:
        self.seq += 1
        delta = Delta(seq=self.seq, text=f"{time.monotonic_ns()} ", ids=[self.seq])
        entry, claimed = self.entry, self.claimed
        return EmitItem(claimed.job_id, entry.job_class, entry.entry_id, claimed.epoch, [delta], None, 1)


@dataclass(slots=True)
class Publisher:
    """So many workers as it takes, through the real scripts: each says a token of all its jobs at every step,
    `TOKENS_PER_S` times a second; their steps are spread evenly over that time, as those of real workers are.
    """

    redis_url: str
    speaking: list[Speaking] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)

    async def run(self, streams: int) -> None:
        """Until standard input is closed."""
        redis = connect(self.redis_url)
        scripts = Scripts(redis, Keys(POOL))
        await make_pool(self.redis_url)
        while len(self.speaking) < streams:
            await self._take(scripts)
        workers = [self.speaking[at : at + SLOTS] for at in range(0, streams, SLOTS)]
        stop = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        loop = asyncio.get_running_loop()
        start_s, step = loop.time(), 0
        while not stop.done():
            due_s = start_s + step / len(workers) / TOKENS_PER_S
            if (early_s := due_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            await scripts.emit([job.say() for job in workers[step % len(workers)]])
            self.late_ms.append((loop.time() - due_s) * 1e3)
            step += 1
        await redis.aclose()

    async def _take(self, scripts: Scripts) -> None:
        picked = await scripts.pick("bench", 64, budget_tokens=10**9, lease_ms=3_600_000)
        items = [(e.job_class, e.entry_id, e.fields[b"id"].decode(), None) for e in picked.entries]
        claims = await scripts.claim("bench", items, lease_ms=3_600_000, max_attempts=3)
        pairs = zip(picked.entries, claims, strict=True)
        self.speaking += [Speaking(entry, claim) for entry, claim in pairs if claim.outcome == "run"]
        await asyncio.sleep(0.01)


async def make_pool(redis_url: str) -> None:
    """What a worker writes of itself, so that the gateway takes jobs for it."""
    redis, keys = connect(redis_url), Keys(POOL)
    await redis.hset(keys.worker("bench"), mapping={"model": POOL})  # type: ignore[misc]
    await redis.zadd(keys.workers, {"bench": 4e12})
    await redis.sadd(POOLS, POOL)  # type: ignore[misc]
    await redis.aclose()


async def subscribe(redis_url: str, seconds: float) -> dict[str, float]:
    """A bare subscriber to all live channels, as redis-py has it."""
    redis = connect(redis_url, blocking=True)
    latencies_ms: list[float] = []
    number, cpu_s, end_s = 0, time.process_time(), time.monotonic() + seconds
    async with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.psubscribe(Keys(POOL).live("*"))
        async for message in pubsub.listen():
            number += 1
            if number % SAMPLED == 0 and (match := PUBLISHED.search(message["data"])):
                latencies_ms.append((time.monotonic_ns() - int(match[1])) / 1e6)
            if time.monotonic() > end_s:
                break
    cpu_s = time.process_time() - cpu_s
    return {"p99_ms": percentile(latencies_ms, 99), "cpu_us_per_token": cpu_s / max(number, 1) * 1e6}


class Stream:
    """One client's stream. Only a sampled one looks at what it gets."""

    def __init__(self, sampled: bool) -> None:
        self.sampled = sampled
        self.answered = False
        self.tokens = 0
        self.latencies_ms: list[float] = []

    def take(self, data: bytes) -> None:
        self.tokens += data.count(TOKEN)
        if self.sampled:
            now_ns = time.monotonic_ns()
            self.latencies_ms += [(now_ns - int(stamp)) / 1e6 for stamp in STAMP.findall(data)]


class Crowd:
    """Readers of chat streams over sockets of their own, without a task or a parser for each."""

    def __init__(self, url: str, count: int, body: bytes) -> None:
        """Connects and asks. `body`: JSON."""
        host, _, port = url.removeprefix("http://").partition(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.streams: list[Stream] = []
        self._selector = selectors.DefaultSelector()
        self._silent = count  # those that have not been answered
        for number in range(count):
            sock = socket.create_connection((host, int(port)), timeout=60)
            sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            sock.setblocking(False)
            self.streams.append(Stream(number % SAMPLED == 0))
            self._selector.register(sock, selectors.EVENT_READ, self.streams[-1])
            self.read(0)

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    def read(self, timeout_s: float) -> None:
        """What has come, waiting for it that long."""
        for key, _ in self._selector.select(timeout_s):
            sock, stream = cast(socket.socket, key.fileobj), cast(Stream, key.data)
            data = sock.recv(READ_BYTES)
            if not stream.answered:
                _check(data)
                stream.answered = True
                self._silent -= 1
            elif not data:
                raise SystemExit("the server has closed a stream")
            stream.take(data)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        self._selector.close()

    def read_for(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.read(left_s)

    def wait_until_answered(self, *, with_tokens: bool) -> None:
        end_s = time.monotonic() + 120
        while self._silent or (with_tokens and not all(stream.tokens for stream in self.streams)):
            if time.monotonic() > end_s:
                raise SystemExit("not every stream has begun within two minutes")
            self.read(0.1)


def _check(first: bytes) -> None:
    if b" 200 " not in first.split(b"\r\n", 1)[0]:
        raise SystemExit(first[:500].decode(errors="replace") or "the server has closed a stream")


def read(url: str, streams: int, seconds: float, body: bytes) -> None:
    """Says `start` when all streams run, and after `seconds` what came meanwhile."""
    crowd = Crowd(url, streams, body)
    crowd.wait_until_answered(with_tokens=True)
    crowd.read_for(WARM_UP_S)
    tokens, cpu_s, wall_s = crowd.tokens, time.process_time(), time.monotonic()
    for stream in crowd.streams:
        stream.latencies_ms.clear()
    print("start", flush=True)
    crowd.read_for(seconds)
    wall_s = time.monotonic() - wall_s
    latencies_ms = [latency for stream in crowd.streams for latency in stream.latencies_ms]
    found = {
        "tokens": crowd.tokens - tokens,
        "wall_s": wall_s,
        "p50_ms": percentile(latencies_ms, 50),
        "p99_ms": percentile(latencies_ms, 99),
        "reader_cpu": (time.process_time() - cpu_s) / wall_s,
    }
    print(json.dumps(found), flush=True)


def hold(url: str, streams: int, body: bytes) -> None:
    """Says `start` when all streams are open, and holds them until standard input is closed."""
    crowd = Crowd(url, streams, body)
    crowd.wait_until_answered(with_tokens=False)
    print("start", flush=True)
    sys.stdin.read()


class Side:
    """One of these processes, which says what it finds in lines."""

    def __init__(
        self, role: str, url: str, streams: int, seconds: float = 0.0, body: Mapping[str, Any] | None = None
    ) -> None:
        arguments = [role, url, str(streams), str(seconds), json.dumps(body)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gateway_sides", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def line(self) -> str:
        """The next one. Raises LoadError when there is none."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if found := self._process.stdout.readline():
            return found
        told = self._process.stderr.read().strip().splitlines()[-1:]
        raise LoadError(*told or ["a side of the measurement has ended"])

    def found(self) -> dict[str, float]:
        figures: dict[str, float] = json.loads(self.line())
        return figures

    def stop(self) -> dict[str, float]:
        """What it found, of one that runs until its input is closed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None
        return self.found()


def _main(arguments: Sequence[str]) -> None:
    role, url, streams, seconds, body = arguments
    if role == "publish":
        publisher = Publisher(url)
        uvloop.run(publisher.run(int(streams)))
        print(json.dumps({"late_p99_ms": percentile(publisher.late_ms, 99)}))
    elif role == "subscribe":
        print(json.dumps(uvloop.run(subscribe(url, float(seconds)))))
    elif role == "read":
        read(url, int(streams), float(seconds), body.encode())
    else:
        hold(url, int(streams), body.encode())


if __name__ == "__main__":
    _main(sys.argv[1:])

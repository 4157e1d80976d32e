"""A gateway as a real server on a free port, and a scripted worker that answers through the real scripts."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import redis.asyncio
import uvicorn

from gateway.app import create_app
from gateway.server import listen, make_server
from headrace.config import GatewaySettings
from headrace.connect import connect
from headrace.errors import HeadraceError
from headrace.keys import POOLS, Keys
from headrace.messages import Choice, Delta, End, Event, Finish, Job, Result, TokenLogprob, Usage
from headrace.script_types import Claimed, EmitItem, Entry, Final
from headrace.scripts import Scripts
from headrace.submission import Limits, parse_entry

POOL = "smollm2"
PROMPT_TOKENS = 3
FINGERPRINT = "fp-test"
WORKER = "w1"


def word(choice: int, position: int) -> str:
    return f"{chr(ord('a') + choice)}{position} "


def text_of(choice: int, num_tokens: int) -> str:
    return "".join(word(choice, position) for position in range(num_tokens))


def logprob(text: str, token_id: int, num_top: int) -> TokenLogprob:
    top = [TokenLogprob(id=token_id + k, lp=-0.5 - k, b=list(f"{text}{k}".encode())) for k in range(num_top)]
    return TokenLogprob(id=token_id, lp=-0.5, b=list(text.encode()), top=top)


@dataclass
class Running:
    """One claimed job: emits one token a choice at each step, `max_tokens` of them."""

    entry: Entry
    claimed: Claimed
    job: Job
    padding: str = ""
    seq: int = 0
    position: int = 0

    @property
    def num_tokens(self) -> int:
        return self.job.params.max_tokens or 4

    def step(self) -> EmitItem:
        if self._prompt().startswith("fail ") and self.position == 1:
            return self.end("failed", HeadraceError(self._prompt().split()[1]).to_wire())
        if self.position < self.num_tokens:
            events = [self._delta(choice) for choice in range(self.job.params.n)]
            self.position += 1
            return self._item(events)
        events = [
            Finish(seq=self._next_seq(), i=choice, reason="length") for choice in range(self.job.params.n)
        ]
        return self.end("done", None, events)

    def end(self, status: Any, error: dict[str, Any] | None, events: list[Event] | None = None) -> EmitItem:
        events = events or []
        done = self.position * self.job.params.n
        usage = Usage(
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=done,
            total_tokens=PROMPT_TOKENS + done,
            cached_tokens=1,
        )
        events.append(End(seq=self._next_seq(), status=status, usage=usage, error=error))
        result = Result(
            choices=self._choices(),
            fingerprint=FINGERPRINT,
            seed=self.job.params.seed,
            prompt_lp=self._prompt_lp(),
        )
        return self._item(events, Final(status, usage, result if status == "done" else None, error))

    def _delta(self, choice: int) -> Delta:
        text = word(choice, self.position) + self.padding
        prompt_lp = self._prompt_lp() if self.seq == 0 else None
        return Delta(
            seq=self._next_seq(),
            i=choice,
            text=text,
            ids=[self.position],
            lp=self._lp(text, self.position),
            prompt_lp=prompt_lp,
        )

    def _prompt_lp(self) -> list[TokenLogprob | None] | None:
        num_top = self.job.params.prompt_logprobs
        return None if num_top is None else [None, logprob("mpt", 7, num_top)]

    def _choices(self) -> list[Choice]:
        return [
            Choice(
                index=choice,
                text=text_of(choice, self.position),
                ids=list(range(self.position)),
                finish_reason="length",
                lp=self._all_lp(choice),
            )
            for choice in range(self.job.params.n)
        ]

    def _all_lp(self, choice: int) -> list[TokenLogprob] | None:
        if self.job.params.logprobs is None:
            return None
        return [p for k in range(self.position) for p in self._lp(word(choice, k), k) or []]

    def _lp(self, text: str, token_id: int) -> list[TokenLogprob] | None:
        num_top = self.job.params.logprobs
        return None if num_top is None else [logprob(text, token_id, num_top)]

    def _prompt(self) -> str:
        if self.job.messages is not None:
            return str(self.job.messages[-1]["content"])
        return self.job.prompt or ""

    def _next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def _item(self, events: list[Event], final: Final | None = None) -> EmitItem:
        return EmitItem(
            self.job.id,
            self.entry.job_class,
            self.entry.entry_id,
            self.claimed.epoch,
            events,
            final,
            prompt_tokens=PROMPT_TOKENS,
        )


@dataclass
class FakeWorker:
    """Answers every job with countable words: choice 0 says `a0 a1 a2 …`, choice 1 says `b0 b1 b2 …`."""

    redis: redis.asyncio.Redis
    step_s: float = 0.0
    padding: str = ""
    running: list[Running] = field(default_factory=list)
    seen: list[Job] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: holds all jobs where they are
    keys: Keys = field(default_factory=lambda: Keys(POOL))

    async def run(self) -> None:
        self.gate.set()
        scripts = Scripts(self.redis, self.keys)
        await self._write_card()
        while True:
            await self._take(scripts)
            if self.running and self.gate.is_set():
                await self._step(scripts)
                await asyncio.sleep(self.step_s)
            else:
                await asyncio.sleep(0.005)

    async def _write_card(self) -> None:
        await self.redis.hset(self.keys.worker(WORKER), mapping={"model": POOL, "fingerprint": FINGERPRINT})
        await self.redis.zadd(self.keys.workers, {WORKER: 4e12})
        await self.redis.sadd(POOLS, POOL)

    async def _take(self, scripts: Scripts) -> None:
        picked = await scripts.pick(WORKER, 16, budget_tokens=1_000_000, lease_ms=60_000)
        jobs = [parse_entry(POOL, e.job_class, e.entry_id, e.fields, Limits()) for e in picked.entries]
        items = [(job.job_class, job.entry_id, job.id, job.ttl_ms) for job in jobs]
        claims = await scripts.claim(WORKER, items, lease_ms=60_000, max_attempts=3)
        for entry, claim, job in zip(picked.entries, claims, jobs, strict=True):
            if claim.outcome == "run":
                self.seen.append(job)
                self.running.append(Running(entry, claim, job, self.padding))

    async def _step(self, scripts: Scripts) -> None:
        items = [job.step() for job in self.running]
        outcomes = await scripts.emit(items)
        cancelled = [
            job.end("cancelled", None)
            for job, item, outcome in zip(self.running, items, outcomes, strict=True)
            if outcome.kind == "cancel" and item.final is None
        ]
        await scripts.emit(cancelled)
        ended = {item.job_id for item in [*items, *cancelled] if item.final is not None}
        self.running = [job for job in self.running if job.job.id not in ended]


@dataclass
class Server:
    url: str
    port: int
    app: Any
    server: uvicorn.Server


Gateways = Callable[..., Awaitable[Server]]


@asynccontextmanager
async def serving(settings: GatewaySettings) -> AsyncIterator[Server]:
    sock: socket.socket = listen(settings.host, settings.port)
    app = create_app(settings)
    server = make_server(app, settings)
    task = asyncio.create_task(server._serve([sock]))
    try:
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0.005)
        port = sock.getsockname()[1]
        yield Server(f"http://127.0.0.1:{port}", port, app, server)
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def start_gateway(redis_url: str) -> AsyncIterator[Gateways]:
    """Starts gateways with settings of the test's own; all of them stop with the test."""
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> Server:
            settings = {"redis_url": redis_url, "port": 0, "drain_timeout_s": 1.0, **changes}
            return await stack.enter_async_context(serving(GatewaySettings(**settings)))

        yield start


@pytest.fixture
async def gateway(start_gateway: Gateways) -> Server:
    return await start_gateway()


@pytest.fixture
async def http(gateway: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        yield client


@pytest.fixture
async def db(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def worker(db: redis.asyncio.Redis) -> AsyncIterator[FakeWorker]:
    fake = FakeWorker(db)
    task = asyncio.create_task(fake.run())
    yield fake
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def kit() -> Any:
    """This module's helpers, for tests that cannot import a conftest."""
    return sys.modules[__name__]


async def eventually(condition: Callable[[], Awaitable[Any]], timeout_s: float = 5.0) -> Any:
    """Polls until `condition` is truthy; the test fails when it never is."""
    async with asyncio.timeout(timeout_s):
        while True:
            if value := await condition():
                return value
            await asyncio.sleep(0.01)


async def channels(db: redis.asyncio.Redis) -> list[bytes]:
    return [name for name in await db.pubsub_channels() if b":live:" in name]

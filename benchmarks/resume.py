"""The proof of resuming: workers killed at every token of every kind of answer, and no client can tell.

`python -m benchmarks.resume` (`--real` for the demo model). Jobs of one kind start a token apart, so that one
SIGKILL hits them at every position at once; rounds go on until each position was hit. Each client streams a
completion or a chat through a gateway, and beside it the job's own events. The SHA-256 of what both got must
be that of an undisturbed run; only names and dates are left out. There is no position between the last token
and the end: both are one write.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from benchmarks.relay import Relay
from benchmarks.serving import own_redis
from headrace.connect import connect
from headrace.keys import Keys
from headrace.processes import start_child, stop_child

POOL = "resume"
KEYS = Keys(POOL)
LEASE_MS = 1_000
START_S = 60.0
SILENCE_S = 60.0  # no client waits longer than this for the next line
_NAMES = re.compile(r'"(id|created|system_fingerprint)":("[^"]*"|\d+|null),?')
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
THEME = "👩‍🔬 🌊 水車で発電する été "


@dataclass(frozen=True, slots=True)
class Kind:
    """One request, always the same to the last field, seed included."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))


@dataclass(frozen=True, slots=True)
class Heard:
    """What one client heard of a job: digests of both streams, the text, and how many tokens a choice had."""

    kind: Kind
    job_id: str
    digests: tuple[str, str]
    text: str
    tokens: int


@dataclass(slots=True)
class Report:
    """By kind: positions there are and positions that were hit; and the jobs that were heard differently."""

    jobs: int = 0
    kills: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    hit: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    different: list[str] = field(default_factory=list)

    def missing(self, every: int = 1) -> dict[str, list[int]]:
        """Positions nobody was killed at; of each `every` neighbours one is enough."""
        found = {}
        for kind, count in self.positions.items():
            blocks = [range(at, min(at + every, count)) for at in range(0, count, every)]
            if left := [block.start for block in blocks if self.hit[kind].isdisjoint(block)]:
                found[kind] = left
        return found


def make_kinds(tokens: int) -> list[Kind]:
    """All but the one with stop strings, which need a text to be chosen from."""
    shared = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
    chat = shared | {"messages": [{"role": "user", "content": "Tell of a river and " + THEME}]}
    drawn = chat | {"temperature": 0.9, "seed": 7}
    return [
        Kind("seeded", CHAT, drawn),
        Kind("penalised", CHAT, drawn | {"frequency_penalty": 0.6, "repetition_penalty": 1.2}),
        Kind("two", CHAT, drawn | {"n": 2}),
        Kind("logprobs", CHAT, drawn | {"logprobs": True, "top_logprobs": 3}),
        Kind("bytes", COMPLETION, shared | {"prompt": THEME * 4, "temperature": 0}),
    ]


def with_stop(seeded: Kind, text: str) -> Kind:
    """The seeded request, to end at something it says half-way."""
    at = len(text) // 2
    return Kind("stop", CHAT, seeded.body | {"stop": [text[at : at + 3], "not said"]})


class Clients:
    """Streams requests through one gateway."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=SILENCE_S, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        listed = (await self._http.get("/v1/models")).raise_for_status().json()
        return str(listed["data"][0]["id"])

    async def hear(self, kind: Kind, model: str, started: asyncio.Future[str] | None = None) -> Heard:
        """Up to the end. `started` gets the job's id as soon as it has one."""
        body = {**kind.body, "model": model}
        digest, text = hashlib.sha256(), []
        async with self._http.stream("POST", kind.path, json=body) as response:
            await _checked(response)
            job_id = response.headers["x-headrace-jobs"]
            if started is not None:
                started.set_result(job_id)
            events = asyncio.create_task(self._events(job_id))
            try:
                async for data in _data(response):
                    digest.update(_NAMES.sub("", data).encode())
                    text += _texts(data)
                deltas, events_digest = await events
            finally:
                events.cancel()
        tokens = deltas // kind.choices
        return Heard(kind, job_id, (digest.hexdigest(), events_digest), "".join(text), tokens)

    async def _events(self, job_id: str) -> tuple[int, str]:
        digest, deltas = hashlib.sha256(), 0
        async with self._http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
            await _checked(response)
            async for data in _data(response):
                digest.update(data.encode())
                deltas += '"type":"delta"' in data
        return deltas, digest.hexdigest()


async def _checked(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")


async def _data(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        elif line.startswith("id: "):
            yield line


def _texts(data: str) -> list[str]:
    if not data.startswith("{"):
        return []
    choices = json.loads(data)["choices"]
    return [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]


def _told_url(log: Path) -> str:
    told = [line for line in log.read_text().splitlines() if '"listening"' in line]
    return str(json.loads(told[0])["url"]) if told else ""


@asynccontextmanager
async def gateway(redis_url: str, log: Path) -> AsyncIterator[str]:
    """A gateway process: its URL."""
    command = [sys.executable, "-m", "gateway", "--redis-url", redis_url, "--pool", POOL, "--port", "0"]
    with log.open("wb") as output:
        process = start_child([*command, "--log-format", "json"], output=output)
    try:
        async with asyncio.timeout(START_S):
            while not (url := _told_url(log)):
                if process.poll() is not None:
                    raise RuntimeError(f"the gateway did not start; see {log}")
                await asyncio.sleep(0.05)
        yield url
    finally:
        await asyncio.to_thread(stop_child, process, timeout_s=10.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """`every`: a group of jobs starts at each so many tokens. `step_ms`: of the simulated model; 0: real."""

    tokens: int = 32
    every: int = 1
    step_ms: float = 100.0
    most_rounds: int = 6

    @property
    def settings(self) -> dict[str, str | int]:
        # Without the prefix cache: what it saved is told to the client, and differs from run to run.
        settings: dict[str, str | int] = {"prefix_cache": "false", "lease_ms": LEASE_MS}
        settings |= {
            "log_format": "json",
            "max_num_seqs": 512,
            "max_num_batched_tokens": 1024,
            "adaptive": "false",
        }
        return settings | ({"model": f"simulated:step_ms={self.step_ms}"} if self.step_ms else {})


async def rehearse(plan: Plan, folder: Path) -> Report:
    """Rounds until every position was hit. Raises RuntimeError, ServingError, TimeoutError."""
    with own_redis() as server:
        async with gateway(server.url, folder / "gateway.log") as url, AsyncExitStack() as stack:
            relay = Relay(stack, server, POOL, plan.settings, folder)
            await relay.prepare()
            redis = connect(server.url)
            stack.push_async_callback(redis.aclose)
            clients = Clients(url)
            stack.push_async_callback(clients.close)
            model = await clients.model()
            calm = await undisturbed(clients, model, plan.tokens)
            report = Report(positions={name: heard.tokens for name, heard in calm.items()})
            while report.missing(plan.every) and report.kills < plan.most_rounds:
                if report.kills:
                    await relay.prepare()
                heard = await one_round(redis, clients, model, plan, list(calm.values()), relay)
                report.kills += 1
                await judge(redis, heard, calm, report)
    return report


async def undisturbed(clients: Clients, model: str, tokens: int) -> dict[str, Heard]:
    kinds = make_kinds(tokens)
    calm = {kind.name: await clients.hear(kind, model) for kind in kinds}
    calm["stop"] = await clients.hear(with_stop(kinds[0], calm["seeded"].text), model)
    if calm["stop"].tokens >= tokens or all(heard.text.isascii() for heard in calm.values()):
        raise RuntimeError("the answers do not hold what is to be tested")
    return calm


class Metronome:
    """A job that runs all the time: its tokens are the worker's steps."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._log = ""
        self._said = "0"
        self._id = ""

    async def start(self) -> None:
        fields: dict[Any, Any] = {"prompt": "tick", "max_tokens": 4000, "ignore_eos": "true"}
        entry: bytes = await self._redis.xadd(KEYS.queue("high"), fields)
        self._id = f"high-{entry.decode()}"
        self._log, self._said = KEYS.log(self._id), "0"

    async def next(self) -> None:
        """Returns behind the next step that has not been seen."""
        async with asyncio.timeout(SILENCE_S):
            while not (new := await self._redis.xread({self._log: self._said}, block=1000)):
                pass
        self._said = new[0][1][-1][0].decode()

    async def stop(self) -> None:
        await self._redis.hset(KEYS.job(self._id), "cancel", "1")  # type: ignore[misc]


async def one_round(
    redis: Redis, clients: Clients, model: str, plan: Plan, calm: list[Heard], relay: Relay
) -> list[Heard]:
    """A group of jobs at each `every` steps, until the first job is about to end; then the kill."""
    metronome, crowd = Metronome(redis), Crowd(redis, clients, model)
    await metronome.start()
    async with asyncio.TaskGroup() as group:
        crowd.start(group, calm[0].kind)
        while not await crowd.ripe(plan.tokens, kinds=len(calm)):
            for _ in range(plan.every):
                await metronome.next()
            for heard in calm:
                crowd.start(group, heard.kind)
        relay.kill()
        await metronome.stop()
    return [task.result() for task in crowd.tasks]


class Crowd:
    """The jobs of one round, and where they are."""

    def __init__(self, redis: Redis, clients: Clients, model: str) -> None:
        self._redis, self._clients, self._model = redis, clients, model
        self._started: list[tuple[Kind, asyncio.Future[str]]] = []
        self.tasks: list[asyncio.Task[Heard]] = []

    def start(self, group: asyncio.TaskGroup, kind: Kind) -> None:
        job_id: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started.append((kind, job_id))
        self.tasks.append(group.create_task(self._clients.hear(kind, self._model, job_id)))

    async def ripe(self, tokens: int, kinds: int) -> bool:
        """Whether the first job has come to its last token, and some job of each kind is between two."""
        known = [(kind, job_id.result()) for kind, job_id in self._started if job_id.done()]
        async with self._redis.pipeline(transaction=False) as pipe:
            for _, job_id in known:
                pipe.xlen(KEYS.log(job_id))
                pipe.hexists(KEYS.job(job_id), "t_end")
            found = await pipe.execute()
        said = list(zip(known, found[::2], found[1::2], strict=True))
        under_way = {kind.name for (kind, _), length, ended in said if length and not ended}
        return bool(said) and said[0][1] >= tokens - 1 and len(under_way) == kinds


async def judge(redis: Redis, heard: list[Heard], calm: dict[str, Heard], report: Report) -> None:
    for one in heard:
        report.jobs += 1
        raw: bytes | None = await redis.hget(KEYS.job(one.job_id), "history")  # type: ignore[misc]
        for death in json.loads(raw or b"[]"):
            report.hit[one.kind.name].add(death["seq"] // one.kind.choices)
        if one.digests != calm[one.kind.name].digests:
            report.different.append(f"{one.kind.name} {one.job_id} {raw!r}")


def show(report: Report, console: Console) -> None:
    table = Table("kind", "positions", "killed at", title=f"{report.jobs} jobs, {report.kills} kills")
    for kind, count in report.positions.items():
        table.add_row(kind, str(count), str(len(report.hit[kind] & set(range(count)))))
    console.print(table)
    console.print(f"heard differently: {len(report.different)} {report.different[:5]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--every", type=int, default=1, help="tokens between two groups of jobs")
    parser.add_argument("--step-ms", type=float, default=100, help="of the simulated model")
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--real", action="store_true", help="the demo model instead of the simulated one")
    args = parser.parse_args()
    plan = Plan(args.tokens, args.every, 0 if args.real else args.step_ms, args.rounds)
    with tempfile.TemporaryDirectory(prefix="hr-resume-") as folder:
        report = asyncio.run(rehearse(plan, Path(folder)))
    console = Console(width=None if sys.stdout.isatty() else 110)
    show(report, console)
    missing = report.missing(args.every)
    if missing:
        console.print(f"never killed at: {missing}")
    return 1 if report.different or missing else 0


if __name__ == "__main__":
    sys.exit(main())

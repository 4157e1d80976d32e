"""Jobs under fire: what is submitted, what a follower hears, and whether an undisturbed run says the same.

Every job is run twice with one request: first in peace, then while things are killed. The two must agree in
every event, byte for byte; only what the prefix cache saved may differ.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from redis.exceptions import RedisError

from headrace.client import JobState
from headrace.errors import HeadraceError
from headrace.messages import Delta, End, Event, Finish

T = TypeVar("T")
MARKER = "hr:chaos"  # a Redis without this key is not to be fired at
PATIENCE_S = 60.0  # a job may be silent for this long under fire
THEMES = (
    "Why is the sky blue?",
    "水車で発電する",
    "Der Fluß fließt",
    "Счёт, пожалуйста",
    "👩‍🔬 explains rain",
)
STOPS = ([" 水車 stone"], ["été a", "🌊 the"], [" because of", "。"])
Spoken = tuple[tuple[Any, ...], ...]


class CalmError(Exception):
    """The undisturbed run went wrong already: there is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class Request:
    """One job's request, and what an undisturbed run said."""

    number: int
    kind: str
    fields: dict[str, Any]
    expected: Spoken = ()


def make_requests(seed: int, count: int, max_tokens: int) -> list[Request]:
    """Greedy, seeded, n = 2, stop strings, logprobs, penalties and chats, in turn."""
    rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    return [_request(rng, number, max_tokens) for number in range(count)]


def _request(rng: random.Random, number: int, max_tokens: int) -> Request:
    prompt = f"{rng.choice(THEMES)} {number}"
    drawn = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.9, "seed": rng.getrandbits(40)}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seeded": {},
        "two": {"n": 2},
        "stop": {"stop": rng.choice(STOPS)},
        "logprobs": {"logprobs": 2},
        "penalised": {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
        "chat": {"prompt": None, "messages": [{"role": "user", "content": prompt}]},
    }
    kind = list(kinds)[number % len(kinds)]
    return Request(number, kind, {k: v for k, v in (drawn | kinds[kind]).items() if v is not None})


def spoken(events: Sequence[Event]) -> Spoken:
    """Everything a reader of these events can tell, but for the prefix cache's part."""
    return tuple(_said(event) for event in events)


def _said(event: Event) -> tuple[Any, ...]:
    if isinstance(event, Delta):
        scores = None if event.lp is None else tuple((lp.id, lp.lp, tuple(lp.b)) for lp in event.lp)
        return event.seq, "delta", event.i, event.text, tuple(event.ids), scores
    if isinstance(event, Finish):
        return event.seq, "finish", event.i, event.reason, event.stop
    used = (event.usage.prompt_tokens, event.usage.completion_tokens) if event.usage else None
    return event.seq, "end", event.status, used, event.error and event.error.get("code")


@dataclass(slots=True)
class Heard:
    """What one attached follower heard of a job. `fault` is empty for a good one."""

    request: Request
    job_id: str
    events: list[Event] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    attempt: int = 0
    lost: bool = False
    fault: str = ""

    @property
    def tokens(self) -> int:
        return sum(len(event.ids) for event in self.events if isinstance(event, Delta))


class Producer(Protocol):
    """What the crowd needs of a client. Raises RedisError or OSError where the call may be made again."""

    async def submit(self, *, job_id: str, **fields: Any) -> str: ...

    async def poll(self, job_id: str) -> JobState | None: ...

    def follow(self, job_id: str) -> AsyncGenerator[Event, None]: ...


class Crowd:
    """Submits requests, follows each job from the start, and judges what was heard.

    The `producers` take the requests in turn.
    """

    def __init__(self, *producers: Producer, at_once: int, may_lose: bool = False) -> None:
        self._producers = producers
        self._at_once = asyncio.Semaphore(at_once)
        self._may_lose = may_lose
        self.heard: list[Heard] = []
        self.faults: Counter[str] = Counter()

    async def run(
        self, requests: Sequence[Request], prefix: str, wait: Callable[[], Awaitable[None]] | None = None
    ) -> list[Heard]:
        """All of them, at most so many at once; `wait` is asked before each one."""
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                await self._at_once.acquire()
                if wait is not None:
                    await wait()
                tasks.create_task(self._one(request, f"{prefix}-{request.number}"))
        return self.heard

    async def _one(self, request: Request, job_id: str) -> None:
        heard = Heard(request, job_id)
        try:
            await self._listen(heard)
        except HeadraceError as error:
            heard.lost = error.code == "lost"
            heard.fault = "" if heard.lost and self._may_lose else f"told {error.code}: {error.message}"
        except TimeoutError:
            heard.fault = "endless wait"
        except (RedisError, OSError) as error:
            heard.fault = f"{type(error).__name__}: {error}"
        finally:
            self._at_once.release()
        heard.fault = heard.fault or self._judge(heard)
        self.heard.append(heard)

    async def _listen(self, heard: Heard) -> None:
        producer = self._producers[heard.request.number % len(self._producers)]
        await _patiently(lambda: producer.submit(job_id=heard.job_id, **heard.request.fields))
        last_s = time.monotonic()
        async with aclosing(producer.follow(heard.job_id)) as events:
            while True:
                async with asyncio.timeout(PATIENCE_S):
                    event = await anext(events, None)
                if event is None:
                    break
                now_s = time.monotonic()
                if heard.events:
                    heard.gaps_s.append(now_s - last_s)
                last_s = now_s
                heard.events.append(event)
        await self._check_state(producer, heard)

    async def _check_state(self, producer: Producer, heard: Heard) -> None:
        """What a poller sees behind the end. A server that lost its tail may have to come to it again."""
        state = await _patiently(lambda: producer.poll(heard.job_id))
        end_s = time.monotonic() + PATIENCE_S
        while self._may_lose and state and not state.ended and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
            state = await _patiently(lambda: producer.poll(heard.job_id))
        if state is None and self._may_lose:
            heard.lost = True
            return
        heard.attempt = state.attempt if state else 0
        if state is None or not state.ended or (state.seq != heard.events[-1].seq and not self._may_lose):
            heard.fault = f"state {state and (state.status, state.seq)} after the end"

    def _judge(self, heard: Heard) -> str:
        said, expected = spoken(heard.events), heard.request.expected
        if said and said[-1][1] == "end" and said[-1][-1] == "lost":
            heard.lost = True
            if not self._may_lose:
                return "told lost"
        if not heard.lost and [event.seq for event in heard.events] != list(range(1, len(said) + 1)):
            return "seqs have a gap"
        if heard.lost:
            cut = [part for part in said if part[1] != "end"]
            return "" if tuple(cut) == expected[: len(cut)] else "other bytes before the loss"
        if sum(isinstance(event, End) for event in heard.events) != 1 or said[-1][1] != "end":
            return "not exactly one end"
        if not expected:
            return "" if said[-1][2] == "done" else f"undisturbed run ended {said[-1]}"
        return "" if said == expected else _difference(said, expected)


async def _patiently(call: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call()
            except (RedisError, OSError):
                await asyncio.sleep(0.1)


def _difference(said: Spoken, expected: Spoken) -> str:
    pairs = zip(said, expected, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(said), len(expected)))
    return f"event {at + 1}: {said[at : at + 1]} instead of {expected[at : at + 1]}"


def with_expected(requests: Sequence[Request], heard: Sequence[Heard]) -> list[Request]:
    """The requests with what was heard of each in peace. Raises CalmError if that went wrong."""
    bad = [f"{h.job_id}: {h.fault}" for h in heard if h.fault]
    if bad:
        raise CalmError(f"{len(bad)} jobs failed undisturbed, the first: {bad[0]}")
    by_number = {h.request.number: spoken(h.events) for h in heard}
    return [Request(r.number, r.kind, r.fields, by_number[r.number]) for r in requests]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def report(heard: Sequence[Heard]) -> dict[str, float | int | str]:
    """The figures of a crowd: jobs, tokens, takeovers, lost, bad, and the gaps between events in ms."""
    gaps_ms = [gap * 1000 for h in heard for gap in h.gaps_s]
    figures: dict[str, float | int | str] = {
        "jobs": len(heard),
        "tokens": sum(h.tokens for h in heard),
        "takeovers": sum(max(h.attempt - 1, 0) for h in heard),
        "lost_jobs": sum(h.lost for h in heard),
        "bad_jobs": sum(bool(h.fault) for h in heard),
    }
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)):
        figures[f"gap_{name}_ms"] = round(percentile(gaps_ms, share), 1)
    slowest = max(heard, key=lambda h: max(h.gaps_s, default=0.0), default=None)
    return figures | ({"slowest_job": slowest.job_id} if slowest else {})

"""The gateway's Prometheus series: all present from the start, one registry an app."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.store import ESTIMATES
from headrace.errors import ERRORS
from headrace.messages import CLASSES, Delta, End, Event
from headrace.usage import KINDS, UsageTotals

OTHER = "other"
LIMITS = ("rate", "quota", "model")
TIMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Owns the series. Labels come from closed lists, never from what a client wrote."""

    def __init__(self, pool: str) -> None:
        self.registry = CollectorRegistry()
        common: Any = {"namespace": "headrace_gateway", "registry": self.registry}
        timed: Any = {"labelnames": ["route"], "buckets": _SECONDS, **common}
        self.requests = Counter("requests", "Requests by route and status.", ["route", "status"], **common)
        self.errors = Counter("errors", "Failures by error code.", ["code"], **common)
        self.in_flight = Gauge("streams_in_flight", "Open event streams.", **common)
        self.left = Counter("clients_left", "Clients that left before the end.", **common)
        self.ttft = Histogram("ttft_seconds", "From request to first token.", **timed)
        self.e2e = Histogram("e2e_seconds", "From request to terminal event.", **timed)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of answered requests.", **common)
        self.completion_tokens = Counter("completion_tokens", "Tokens of answered requests.", **common)
        self.redis_up = Gauge("redis_up", "1 when Redis answered the last question.", **common)
        self.queue = Gauge("queue_entries", "Queue entries, running too.", ["pool", "class"], **common)
        self.running = Gauge("jobs_running", "Jobs that a worker holds.", ["pool"], **common)
        self.workers = Gauge("workers", "Live workers.", ["pool"], **common)
        self.estimates = Gauge(
            "deadline_estimates",
            "Jobs with a deadline, not strict: how many, how many a strict one would have refused, "
            "and how many of those were in time after all.",
            ["pool", "kind"],
            **common,
        )
        self.limited = Counter("limited", "Requests that a tenant's limits refused.", ["reason"], **common)
        self.tenant_used = Gauge(
            "tenant_used", "Used this month by tenants that have a key.", ["tenant", "kind"], **common
        )
        self._start_at_zero(pool)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def know_routes(self, routes: Iterable[str]) -> None:
        """Their templates; requests to others are counted together."""
        for route in (*routes, OTHER):
            self.requests.labels(route, "200")

    def count_end(self, event: End) -> None:
        if event.usage is not None:
            self.prompt_tokens.inc(event.usage.prompt_tokens)
            self.completion_tokens.inc(event.usage.completion_tokens)

    def count_error(self, code: str) -> None:
        self.errors.labels(code).inc()

    def set_pool(
        self,
        pool: str,
        *,
        entries: Mapping[str, int],
        running: int,
        workers: int,
        estimates: Mapping[str, int],
    ) -> None:
        for job_class, count in entries.items():
            self.queue.labels(pool, job_class).set(count)
        for kind, count in estimates.items():
            self.estimates.labels(pool, kind).set(count)
        self.running.labels(pool).set(running)
        self.workers.labels(pool).set(workers)

    def count_limited(self, reason: str) -> None:
        self.limited.labels(reason).inc()

    def set_tenants(self, used: Mapping[str, UsageTotals]) -> None:
        self.tenant_used.clear()
        for tenant, totals in used.items():
            for kind in KINDS:
                self.tenant_used.labels(tenant, kind).set(getattr(totals, kind))

    def _start_at_zero(self, pool: str) -> None:
        for reason in LIMITS:
            self.limited.labels(reason)
        for code in ERRORS:
            self.errors.labels(code)
        for route in TIMED:
            self.ttft.labels(route)
            self.e2e.labels(route)
        none = dict.fromkeys(ESTIMATES, 0)
        self.set_pool(pool, entries=dict.fromkeys(CLASSES, 0), running=0, workers=0, estimates=none)


@dataclass(slots=True)
class Timing:
    """Times one request from its arrival; each of the two moments counts once."""

    metrics: Metrics
    route: str
    arrived_s: float = field(default_factory=time.monotonic)
    _told_first: bool = False

    def heard(self, events: Sequence[Event]) -> None:
        """Of one job, in order."""
        if isinstance(events[-1], End):
            self.metrics.count_end(events[-1])
        if not self._told_first and any(isinstance(event, Delta) for event in events):
            self._told_first = True
            self.metrics.ttft.labels(self.route).observe(time.monotonic() - self.arrived_s)

    def ended(self) -> None:
        self.metrics.e2e.labels(self.route).observe(time.monotonic() - self.arrived_s)


@contextmanager
def open_stream(metrics: Metrics) -> Iterator[None]:
    metrics.in_flight.inc()
    try:
        yield
    finally:
        metrics.in_flight.dec()


class CountRequests:
    """ASGI middleware: counts answers by route template and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def counted(message: Message) -> Awaitable[None]:  # not a coroutine more for each chunk of a stream
            if message["type"] == "http.response.start":
                route = scope.get("path_template") or OTHER
                self._metrics.requests.labels(route, str(message["status"])).inc()
            return send(message)

        await self._app(scope, receive, counted)

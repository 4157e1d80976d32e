"""What a tenant may submit: allowed models, the month's quota, requests and tokens a minute.

A request's tokens are an estimate, as in fair queueing: prompt bytes / 4 and max_tokens for each choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.directory import Directory
from gateway.errors import HttpError
from gateway.store import FieldValue, NewJob
from gateway.tenants import Tenants
from headrace.errors import HeadraceError
from headrace.script_types import FairShare
from headrace.tenants import Policy, Taken
from headrace.usage import UsageTotals

_told: ContextVar[dict[str, str] | None] = ContextVar("headrace_limit_headers", default=None)
_PROMPTS = ("prompt", "messages", "prompt_token_ids", "body")


class RateLimitedError(HeadraceError):
    """`rate_limited`, with the time after which it would pass."""

    def __init__(self, retry_ms: int) -> None:
        super().__init__("rate_limited", f"The rate limit is reached; try again in {_span(retry_ms)}.")
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_ms / 1000)))}


class Limits:
    """Admits one request's jobs, all or none, before any is submitted."""

    def __init__(
        self, tenants: Tenants, directory: Directory, on_refused: Callable[[str], None] = lambda reason: None
    ) -> None:
        """`on_refused` is told why: `rate`, `quota` or `model`."""
        self._tenants = tenants
        self._on_refused = on_refused
        self._directory = directory

    async def admit(self, jobs: Sequence[NewJob]) -> None:
        """Raises `rate_limited`, HttpError 403 for a model or 429 for the quota, RedisError."""
        for tenant in dict.fromkeys(job.tenant for job in jobs):
            await self._admit(tenant, [job for job in jobs if job.tenant == tenant])

    async def allowed(self, tenant: str | None, names: Iterable[str]) -> list[str]:
        """Those of `names` that the tenant may ask for; None: everybody's."""
        policy = Policy() if tenant is None else await self._tenants.policy(tenant)
        return [name for name in names if policy.allows(frozenset({name}))]

    async def usage(self, tenant: str, pools: Sequence[str], month: str | None) -> UsageTotals:
        return await self._tenants.usage(tenant, pools, month)

    async def used_by_tenants(self, pools: Sequence[str]) -> dict[str, UsageTotals]:
        """This month, of tenants that have a key."""
        return await self._tenants.used_by_all(pools)

    async def _admit(self, tenant: str, jobs: Sequence[NewJob]) -> None:
        policy = await self._tenants.policy(tenant)
        if policy == Policy():
            return
        await self._check_models(policy, jobs)
        if policy.weight != 1.0:
            for pool in {job.ref.pool for job in jobs}:
                await self._tenants.tell_weight(pool, tenant, policy.weight)
        await self._check_quota(tenant, policy)
        if policy.requests_per_minute or policy.tokens_per_minute:
            tokens = sum(estimated_tokens(job.fields) for job in jobs)
            taken = await self._tenants.take(tenant, policy, requests=1, tokens=tokens)
            _tell(limit_headers(policy, taken))
            if not taken.taken:
                self._on_refused("rate")
                raise RateLimitedError(taken.retry_ms)

    async def _check_models(self, policy: Policy, jobs: Sequence[NewJob]) -> None:
        if policy.models:
            pools = await self._directory.pools()
            for name in {job.ref.pool for job in jobs}:
                if not policy.allows(pools[name].models if name in pools else frozenset({name})):
                    self._on_refused("model")
                    raise HttpError(403, "This API key may not use this model.", param="model")

    async def _check_quota(self, tenant: str, policy: Policy) -> None:
        if policy.tokens_per_month:
            spent = await self._tenants.spent(tenant, list(await self._directory.pools()))
            if spent >= policy.tokens_per_month:
                self._on_refused("quota")
                text = f"The quota of {policy.tokens_per_month} tokens a month is used up."
                raise HttpError(429, text, code="insufficient_quota")


def estimated_tokens(fields: Mapping[str, FieldValue]) -> int:
    """What a job may come to, before anything is known of it."""
    num_bytes = sum(len(_bytes(fields[name])) for name in _PROMPTS if name in fields)
    output = int(fields.get("max_tokens") or FairShare().default_output)
    return math.ceil(num_bytes / 4) + 1 + output * int(fields.get("n") or 1)


def limit_headers(policy: Policy, taken: Taken) -> dict[str, str]:
    """OpenAI's names. A limit that is not set is not told."""
    rows = (
        ("requests", policy.requests_per_minute, taken.requests_left, taken.requests_full_ms),
        ("tokens", policy.tokens_per_minute, taken.tokens_left, taken.tokens_full_ms),
    )
    headers = {}
    for kind, limit, left, full_ms in rows:
        if limit:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(left)
            headers[f"x-ratelimit-reset-{kind}"] = _span(full_ms)
    return headers


def _span(ms: int) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    return f"{ms // 60_000}m{ms % 60_000 // 1000}s"


def _bytes(value: FieldValue) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _tell(headers: dict[str, str]) -> None:
    told = _told.get()
    if told is not None:
        told.update(headers)


class TellLimits:
    """ASGI middleware: what `admit` found while a request was handled goes into its answer's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        token = _told.set(headers)

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and headers:
                told = [(name.encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", []), *told]
            await send(message)

        try:
            await self._app(scope, receive, telling)
        finally:
            _told.reset(token)

"""GET /v1/jobs: a walk over the jobs that are stored, a page at a time, in no order across pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from litestar import Request, get
from litestar.params import QueryParameter
from redis.asyncio import Redis

from gateway.auth import bound_tenant, tenant_of
from gateway.core import GatewayHere
from gateway.errors import ERROR_RESPONSES
from gateway.jobschema import JobState, job_state
from gateway.store import JobRef
from headrace.errors import HeadraceError
from headrace.keys import Keys, valid_pool
from headrace.messages import CLASSES, ENDED

MAX_LIMIT = 500
SCANS_A_PAGE = 50  # bounds what one request asks of Redis, however few jobs match
FIELDS = (
    "status", "tenant", "class", "seq", "epoch", "attempt", "worker", "t_submit", "t_start", "t_first",
    "t_end", "deadline", "cancel", "usage", "error",
)  # fmt: skip
STATUSES = ("queued", "running", *ENDED)
_CURSOR = re.compile(r"(\d{1,20})\.([A-Za-z0-9._-]{1,64})")


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """`next` leads to the next page; without it this is the last. Results are left out: ask for the job."""

    object: str = "list"
    data: list[JobState]
    has_more: bool
    next: str | None


@get("/jobs", tags=["Jobs"], summary="Jobs that are stored", responses=ERROR_RESPONSES)
async def list_jobs(
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    tenant: Annotated[str | None, QueryParameter(description="Not set: the key's own, or all.")] = None,
    status: Annotated[str | None, QueryParameter(description=", ".join(STATUSES) + ".")] = None,
    job_class: Annotated[
        str | None, QueryParameter(name="class", description=", ".join(CLASSES) + ".")
    ] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="About so many on a page.")] = 50,
    after: Annotated[str | None, QueryParameter(description="`next` of the page before.")] = None,
) -> JobList:
    """Newest first within a page. A job that ends or begins meanwhile may come twice; none that stays is left
    out. What was added to the queue by hand is listed once a worker has taken it."""
    _check("status", status, STATUSES)
    _check("class", job_class, CLASSES)
    whose = tenant_of(request, tenant) if tenant is not None else bound_tenant(request)
    wanted = {"tenant": whose, "status": status, "class": job_class}
    pools = sorted(await gateway.pulse.guard(gateway.directory.pools()))
    cursor, pool = _position(after, pools)
    walk = Walk(gateway.store.redis, pools, pool, cursor)
    found = await gateway.pulse.guard(walk.page(wanted, limit))
    return JobList(data=found, has_more=walk.next is not None, next=walk.next)


class Walk:
    """SCAN over the job hashes of one pool after another."""

    def __init__(self, redis: Redis, pools: list[str], pool: str | None, cursor: int) -> None:
        self._redis = redis
        self._pools = pools
        self._pool = pool
        self._cursor = cursor

    @property
    def next(self) -> str | None:
        return None if self._pool is None else f"{self._cursor}.{self._pool}"

    async def page(self, wanted: Mapping[str, str | None], limit: int) -> list[JobState]:
        found: list[JobState] = []
        for _ in range(SCANS_A_PAGE):
            if self._pool is None or len(found) >= limit:
                break
            found += await self._scan(self._pool, wanted, limit)
        return sorted(found, key=lambda job: job.t_submit or 0, reverse=True)

    async def _scan(self, pool: str, wanted: Mapping[str, str | None], count: int) -> list[JobState]:
        prefix = Keys(pool).job("")
        self._cursor, names = await self._redis.scan(self._cursor, match=f"{prefix}*", count=count)
        if self._cursor == 0:
            self._pool = next((name for name in self._pools if name > pool), None)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(name, list(FIELDS))
            replies = await pipe.execute(raise_on_error=False)
        found = []
        for raw, values in zip(names, replies, strict=True):
            fields = {} if isinstance(values, Exception) else _text(values)
            if "status" in fields and all(want in (None, fields.get(key)) for key, want in wanted.items()):
                ref = JobRef(pool, raw.decode(errors="replace").removeprefix(prefix))
                found.append(job_state(ref, fields))
        return found


def _text(values: list[bytes | None]) -> dict[str, str]:
    pairs = zip(FIELDS, values, strict=True)
    return {name: value.decode(errors="replace") for name, value in pairs if value is not None}


def _position(after: str | None, pools: list[str]) -> tuple[int, str | None]:
    if after is None:
        return 0, pools[0] if pools else None
    match = _CURSOR.fullmatch(after)
    if match is None or not valid_pool(match[2]) or int(match[1]) >= 2**64:
        raise HeadraceError("invalid_request", "Expected `next` of the page before.", "after")
    return int(match[1]), match[2]


def _check(field: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise HeadraceError("invalid_request", f"Expected one of {', '.join(allowed)}.", field)

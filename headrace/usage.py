"""The ledger: what each tenant used in a month. The scripts that end jobs write it; here it is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from redis.asyncio import Redis

from headrace.keys import Keys, this_month

_MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])")
PAGE = 1000


class UsageTotals(msgspec.Struct, kw_only=True):
    """Tokens, except `jobs`. `output` includes that of jobs that did not end well."""

    jobs: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    cancelled: int = 0
    failed: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.output

    @property
    def wasted(self) -> int:
        return self.cancelled + self.failed + self.recomputed


KINDS = UsageTotals.__struct_fields__


def valid_month(text: str) -> bool:
    return _MONTH.fullmatch(text) is not None


async def usage_of(redis: Redis, pools: Iterable[str], tenant: str, month: str | None = None) -> UsageTotals:
    """One tenant's month, summed over `pools`."""
    totals = UsageTotals()
    async with redis.pipeline(transaction=False) as pipe:
        for pool in pools:
            pipe.hmget(Keys(pool).usage(month or this_month()), [f"{tenant}:{kind}" for kind in KINDS])
        replies = await pipe.execute()
    for values in replies:
        for kind, value in zip(KINDS, values, strict=True):
            _add(totals, kind, value)
    return totals


async def usage_by_tenant(
    redis: Redis, pools: Iterable[str], month: str | None = None
) -> dict[str, UsageTotals]:
    """Every tenant's month, summed over `pools`."""
    found: dict[str, UsageTotals] = {}
    for pool in pools:
        entries: Any = redis.hscan_iter(Keys(pool).usage(month or this_month()), count=PAGE)
        async for name, value in entries:
            tenant, _, kind = name.decode(errors="replace").rpartition(":")
            if kind in KINDS:
                _add(found.setdefault(tenant, UsageTotals()), kind, value)
    return dict(sorted(found.items()))


def _add(totals: UsageTotals, kind: str, value: bytes | None) -> None:
    if value is not None and value.lstrip(b"-").isdigit():
        setattr(totals, kind, getattr(totals, kind) + int(value))

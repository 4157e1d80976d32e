"""GET /v1/usage: what a tenant used in a month, the wasted tokens told apart."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, get
from litestar.params import QueryParameter

from gateway.auth import tenant_of
from gateway.core import GatewayHere
from gateway.errors import ERROR_RESPONSES
from headrace.errors import HeadraceError
from headrace.keys import this_month
from headrace.usage import UsageTotals, valid_month


class WastedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """`recomputed`: after a worker was lost; the others are the output of jobs that ended so."""

    cancelled: int
    failed: int
    recomputed: int


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of jobs that ended in `month` (UTC), over all pools. `output_tokens` includes wasted ones."""

    tenant: str
    month: str
    jobs: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wasted_tokens: WastedTokens


@get("/usage", tags=["Tenants"], summary="A tenant's tokens in a month", responses=ERROR_RESPONSES)
async def get_usage(
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    tenant: Annotated[str | None, QueryParameter(description="Not set: the key's own, or `default`.")] = None,
    month: Annotated[str | None, QueryParameter(description="As 2026-11. Not set: this one.")] = None,
) -> TenantUsage:
    if month is not None and not valid_month(month):
        raise HeadraceError("invalid_request", "Expected a month like 2026-11.", "month")
    whose = tenant_of(request, tenant)
    pools = list(await gateway.pulse.guard(gateway.directory.pools()))
    used = await gateway.limits.usage(whose, pools, month)
    return _shown(whose, month or this_month(), used)


def _shown(tenant: str, month: str, used: UsageTotals) -> TenantUsage:
    wasted = WastedTokens(cancelled=used.cancelled, failed=used.failed, recomputed=used.recomputed)
    return TenantUsage(
        tenant=tenant,
        month=month,
        jobs=used.jobs,
        prompt_tokens=used.prompt,
        cached_tokens=used.cached,
        output_tokens=used.output,
        wasted_tokens=wasted,
    )

"""/v1/webhooks: the tenant's signing secret, what was delivered and what was not, and sending it again."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, get, post
from litestar.params import PathParameter, QueryParameter

from gateway.auth import own, tenant_of
from gateway.core import Gateway, GatewayHere
from gateway.errors import ERROR_RESPONSES, not_found
from gateway.tasks.deliveries import Deliveries, Delivery
from gateway.tasks.signing import tenant_secrets
from headrace.keys import valid_job_id

REPLAY_RETENTION_MS = 86_400_000
DeliveryId = Annotated[str, PathParameter(description="The delivery's id: the header `webhook-id`.")]


class Secret(msgspec.Struct, kw_only=True):
    object: str = "webhook.secret"
    secret: str


class DeliveryList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Delivery]
    has_more: bool = False


@get("/webhooks/secret", tags=["Webhooks"], summary="The secret that webhooks are signed with")
async def get_secret(request: Request[Any, Any, Any], gateway: GatewayHere) -> Secret:
    """Signatures are those of Standard Webhooks: any of its libraries checks them with this secret."""
    secrets = await gateway.pulse.guard(tenant_secrets(gateway.store.redis, tenant_of(request, None)))
    return Secret(secret=secrets[0])


@get("/webhooks/deliveries", tags=["Webhooks"], summary="Webhooks, newest first", responses=ERROR_RESPONSES)
async def list_deliveries(
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    before: Annotated[int | None, QueryParameter(ge=0, description="Made before this time, ms.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=100, description="At most so many.")] = 20,
) -> DeliveryList:
    tenant = tenant_of(request, None)
    found: list[Delivery] = []
    for pool in await gateway.pulse.guard(gateway.directory.pools()):
        found += await gateway.pulse.guard(_deliveries(gateway, pool).listed(tenant, before, limit + 1))
    found.sort(key=lambda delivery: delivery.created, reverse=True)
    return DeliveryList(data=found[:limit], has_more=len(found) > limit)


@get(
    "/webhooks/deliveries/{delivery_id:str}",
    tags=["Webhooks"],
    summary="A webhook and its attempts",
    responses=ERROR_RESPONSES,
)
async def get_delivery(
    delivery_id: DeliveryId, request: Request[Any, Any, Any], gateway: GatewayHere
) -> Delivery:
    return await _found(gateway, request, delivery_id)


@post(
    "/webhooks/deliveries/{delivery_id:str}/replay",
    status_code=202,
    tags=["Webhooks"],
    summary="Send a webhook again",
    responses=ERROR_RESPONSES,
)
async def replay(delivery_id: DeliveryId, request: Request[Any, Any, Any], gateway: GatewayHere) -> Delivery:
    """Under the same id, with all its attempts anew; whether it was delivered, given up or is still tried."""
    found = await _found(gateway, request, delivery_id)
    await _deliveries(gateway, found.pool).replay(delivery_id)
    return await _found(gateway, request, delivery_id)


async def _found(gateway: Gateway, request: Request[Any, Any, Any], delivery_id: str) -> Delivery:
    found = await _any_pools(gateway, delivery_id) if valid_job_id(delivery_id) else None
    return own(request, found, not_found("No webhook has this id, or its time of keeping is over."))


async def _any_pools(gateway: Gateway, delivery_id: str) -> Delivery | None:
    for pool in await gateway.pulse.guard(gateway.directory.pools()):
        if found := await gateway.pulse.guard(_deliveries(gateway, pool).read(delivery_id)):
            return found[0]
    return None


def _deliveries(gateway: Gateway, pool: str) -> Deliveries:
    return Deliveries(gateway.store.redis, pool, retention_ms=REPLAY_RETENTION_MS)

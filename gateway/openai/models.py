"""GET /v1/models: every pool by its name, and the names its live workers give their model."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, get
from litestar.params import PathParameter

from gateway.auth import bound_tenant
from gateway.core import GatewayHere
from gateway.directory import Pool
from gateway.errors import ERROR_RESPONSES
from gateway.openai.schema import ModelCard, ModelList
from headrace.errors import HeadraceError


@get("/models", tags=["OpenAI"], summary="Models that can be asked for", responses=ERROR_RESPONSES)
async def list_models(gateway: GatewayHere, request: Request[Any, Any, Any]) -> ModelList:
    pools = await gateway.pulse.guard(gateway.directory.pools())
    cards = {name: _card(gateway, pool, name) for pool in pools.values() for name in sorted(pool.models)}
    allowed = await gateway.limits.allowed(bound_tenant(request), cards)
    return ModelList(data=[cards[name] for name in allowed])


@get("/models/{name:path}", tags=["OpenAI"], summary="One model", responses=ERROR_RESPONSES)
async def get_model(
    gateway: GatewayHere, name: Annotated[str, PathParameter(description="The model's name.")]
) -> ModelCard:
    wanted = name.lstrip("/")
    if not wanted:
        raise HeadraceError("unknown_model", field="model")
    return _card(gateway, await gateway.route(wanted), wanted)


def _card(gateway: GatewayHere, pool: Pool, name: str) -> ModelCard:
    return ModelCard(id=name, created=gateway.started_s, pool=pool.name, workers=len(pool.cards))

"""Puts the gateway together: routes, the connection to Redis, and the loop that ends what can never run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from litestar import Litestar, Router
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme

from gateway import files, fork, health, joblist, jobs, ledger, webhooks
from gateway.auth import Keyring, require_key
from gateway.batches import routes as batches
from gateway.core import Gateway
from gateway.directory import Directory
from gateway.errors import handle
from gateway.limits import Limits, TellLimits
from gateway.metrics import CountRequests, Metrics
from gateway.openai import chat, completions, models
from gateway.pulse import Pulse
from gateway.reaper import reap_forever
from gateway.responses import routes as responses
from gateway.store import Store
from gateway.tenants import Tenants
from gateway.tracing import TraceRequests
from gateway.waiting import Waiting
from headrace.config import GatewaySettings
from headrace.connect import connect
from headrace.follow import Follower
from headrace.tracing import start_tracing

REDIS_TIMEOUT_S = 5.0  # the pulse notices much sooner that nothing answers
_LIMITS = [
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
]
EXPOSED = ("Location", "Retry-After", "x-headrace-jobs", *_LIMITS)
MAX_CONNECTIONS = 16  # shared by requests and followers, whatever their number


def create_app(settings: GatewaySettings) -> Litestar:
    """The ASGI app. Starts without Redis and serves what it can until Redis is there."""
    metrics, tracing = Metrics(settings.pool), start_tracing("headrace-gateway")
    tracer = DefineMiddleware(TraceRequests, tracing=tracing)
    v1 = Router(
        "/v1",
        route_handlers=[
            chat.create_chat_completion,
            completions.create_completion,
            models.list_models,
            models.get_model,
            jobs.create_job,
            joblist.list_jobs,
            jobs.get_job,
            jobs.get_events,
            jobs.cancel_job,
            fork.fork_job,
            ledger.get_usage,
            *responses.ROUTES,
            *batches.ROUTES,
            files.router(settings),
            webhooks.get_secret,
            webhooks.list_deliveries,
            webhooks.get_delivery,
            webhooks.replay,
        ],
        guards=[require_key],
    )
    app = Litestar(
        route_handlers=[v1, health.healthz, health.readyz, health.metrics],
        dependencies={"gateway": Provide(_gateway, sync_to_thread=False)},
        exception_handlers={Exception: handle},
        lifespan=[partial(_lifespan, settings, metrics)],
        middleware=[DefineMiddleware(CountRequests, metrics=metrics), tracer, TellLimits],
        openapi_config=_openapi(),
        cors_config=_cors(settings.cors_origins),
        request_max_body_size=settings.max_body_bytes,
        logging_config=None,
    )
    metrics.know_routes(route.path_format for route in app.routes if route.path.startswith("/v1/"))
    app.state.metrics, app.state.tracing = metrics, tracing
    return app


@asynccontextmanager
async def _lifespan(settings: GatewaySettings, metrics: Metrics, app: Litestar) -> AsyncIterator[None]:
    redis = connect(settings.redis_url, timeout_s=REDIS_TIMEOUT_S, max_connections=MAX_CONNECTIONS)
    probe = connect(settings.redis_url, timeout_s=REDIS_TIMEOUT_S, max_connections=1)
    follower = Follower(settings.redis_url, redis=redis)
    directory = Directory(redis, settings.pool)
    store = Store(redis, follower, directory, settings)
    pulse = Pulse(probe, lambda up: metrics.redis_up.set(int(up)))
    app.state.tenants = tenants = Tenants(redis, pulse)
    app.state.keyring = Keyring(
        settings.api_keys,
        allow_anonymous=settings.allow_anonymous,
        require_key=settings.require_key,
        tenants=tenants,
    )
    limits = Limits(tenants, directory, metrics.count_limited)
    waiting = Waiting(redis)
    app.state.gateway = gateway = Gateway(settings, store, directory, metrics, pulse, limits, waiting)
    await follower.start()
    loops = [asyncio.ensure_future(pulse.run()), asyncio.ensure_future(reap_forever(gateway))]
    try:
        yield
    finally:
        for each in loops:
            each.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await gateway.close()
        await follower.close()
        if app.state.tracing is not None:
            await asyncio.to_thread(app.state.tracing.close)
        await probe.aclose()
        await redis.aclose()


def _gateway(state: State) -> Gateway:
    gateway: Gateway = state.gateway
    return gateway


def _cors(origins: tuple[str, ...]) -> CORSConfig | None:
    """Keys travel in a header, never in cookies, so a page has what its script was given and no more."""
    return CORSConfig(allow_origins=list(origins), expose_headers=list(EXPOSED)) if origins else None


def _openapi() -> OpenAPIConfig:
    key = SecurityScheme(type="http", scheme="bearer", description="Needed when the gateway has API keys.")
    return OpenAPIConfig(
        title="Headrace",
        version="1",
        description="OpenAI-compatible completions, and jobs to poll, stream, resume and cancel.",
        components=Components(security_schemes={"key": key}),
    )

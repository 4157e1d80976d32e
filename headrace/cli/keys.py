"""`headrace keys` and `headrace usage`: who may ask, how much, and what they used."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from headrace.cli.connection import EXIT_FAILED, RedisUrl, run_against
from headrace.cli.options import tell_error
from headrace.config import CommonSettings
from headrace.connect import connect
from headrace.errors import HeadraceError
from headrace.keys import POOLS, valid_pool
from headrace.tenants import Policy, StoredKey, TenantStore
from headrace.usage import KINDS, usage_by_tenant, valid_month

DAY_MS = 86_400_000
Tenant = Annotated[str, typer.Argument(help="Whose key it is: 1 to 64 of A-Z a-z 0-9 . _ @ -")]
Rpm = Annotated[int | None, typer.Option("--requests-per-minute", min=0, help="0: no limit.")]
Tpm = Annotated[int | None, typer.Option("--tokens-per-minute", min=0, help="0: no limit.")]
Quota = Annotated[int | None, typer.Option("--tokens-per-month", min=0, help="0: no limit.")]
Weight = Annotated[float | None, typer.Option(help="Share of a busy pool, 0.001 to 1000; others have 1.")]
Models = Annotated[str | None, typer.Option(help="Allowed models, separated by commas; empty: all.")]


def register(app: typer.Typer) -> None:
    keys = typer.Typer(help="API keys and what their tenants may do.", no_args_is_help=True)
    keys.command("create")(create)
    keys.command("list")(list_)
    keys.command("revoke")(revoke)
    keys.command("limit")(limit)
    app.add_typer(keys, name="keys")
    app.command()(usage)


def create(
    tenant: Tenant,
    redis_url: RedisUrl = None,
    name: Annotated[str, typer.Option(help="What it is for, for the list.")] = "",
    expires_days: Annotated[int, typer.Option(min=0, max=36_500, help="0: never.")] = 0,
    requests_per_minute: Rpm = None,
    tokens_per_minute: Tpm = None,
    tokens_per_month: Quota = None,
    weight: Weight = None,
    models: Models = None,
) -> None:
    """Make a key and print it, this once. Limits are the tenant's: they hold over all its keys."""

    async def action(store: TenantStore, _: Redis) -> int:
        given = _given(requests_per_minute, tokens_per_minute, tokens_per_month, weight, models)
        policy = _changed(await store.policy(tenant), given)  # refuses before a key is made
        key_id, secret = await store.create_key(tenant, name=name, ttl_ms=expires_days * DAY_MS)
        if given:
            await store.set_policy(tenant, policy)
        typer.echo(f"key {key_id} of tenant {tenant}; it is not shown again:", err=True)
        typer.echo(secret)
        return 0

    _run(redis_url, action)


def list_(redis_url: RedisUrl = None) -> None:
    """List all keys, and what their tenants may do."""

    async def action(store: TenantStore, _: Redis) -> int:
        table = Table("key", "tenant", "name", "made", "state", "limits", box=None, pad_edge=False)
        for key in await store.keys():
            limits = _shown(await store.policy(key.tenant))
            table.add_row(key.id, key.tenant, key.name, _date(key.created_ms), _state(key), limits)
        Console(soft_wrap=True).print(table)
        return 0

    _run(redis_url, action)


def revoke(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as `list` shows it.")],
    redis_url: RedisUrl = None,
) -> None:
    """End a key; gateways refuse it within two seconds."""

    async def action(store: TenantStore, _: Redis) -> int:
        if not await store.revoke_key(key_id):
            tell_error(f"no key {key_id}")
            return EXIT_FAILED
        typer.echo(f"revoked {key_id}")
        return 0

    _run(redis_url, action)


def limit(
    tenant: Tenant,
    redis_url: RedisUrl = None,
    requests_per_minute: Rpm = None,
    tokens_per_minute: Tpm = None,
    tokens_per_month: Quota = None,
    weight: Weight = None,
    models: Models = None,
) -> None:
    """Change what a tenant may do; print what holds now."""

    async def action(store: TenantStore, _: Redis) -> int:
        given = _given(requests_per_minute, tokens_per_minute, tokens_per_month, weight, models)
        policy = _changed(await store.policy(tenant), given)
        if given:
            await store.set_policy(tenant, policy)
        typer.echo(_shown(policy))
        return 0

    _run(redis_url, action)


def usage(
    redis_url: RedisUrl = None,
    month: Annotated[str | None, typer.Option(help="As 2026-11; not set: this one.")] = None,
) -> None:
    """Show what each tenant used in a month, in tokens, with what of it was wasted."""

    async def action(_: TenantStore, redis: Redis) -> int:
        if month is not None and not valid_month(month):
            raise HeadraceError("invalid_request", "Expected a month like 2026-11.", "month")
        pools: Any = await redis.smembers(POOLS)  # type: ignore[misc]
        names = [name for raw in pools if valid_pool(name := raw.decode(errors="replace"))]
        table = Table("tenant", *KINDS, "wasted", box=None, pad_edge=False)
        for tenant, used in (await usage_by_tenant(redis, names, month)).items():
            table.add_row(tenant, *(str(getattr(used, kind)) for kind in KINDS), str(used.wasted))
        Console(soft_wrap=True).print(table)
        return 0

    _run(redis_url, action)


def _run(redis_url: str | None, action: Callable[[TenantStore, Redis], Awaitable[int]]) -> None:
    async def connected(settings: CommonSettings) -> int:
        redis = connect(settings.redis_url)
        try:
            return await action(TenantStore(redis), redis)
        finally:
            await redis.aclose()

    run_against(redis_url, None, connected)


def _given(
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    tokens_per_month: int | None,
    weight: float | None,
    models: str | None,
) -> dict[str, Any]:
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_month": tokens_per_month,
        "weight": weight,
        "models": None if models is None else [name.strip() for name in models.split(",") if name.strip()],
    }
    return {name: value for name, value in given.items() if value is not None}


def _changed(policy: Policy, given: dict[str, Any]) -> Policy:
    """Raises HeadraceError for a value out of range."""
    try:
        return msgspec.convert({**msgspec.structs.asdict(policy), **given}, Policy)
    except msgspec.ValidationError as problem:
        raise HeadraceError("invalid_request", str(problem)) from None


def _shown(policy: Policy) -> str:
    values = msgspec.to_builtins(policy)
    if policy.models:
        values["models"] = ",".join(policy.models)
    return " ".join(f"{name}={value}" for name, value in values.items()) or "none"


def _state(key: StoredKey) -> str:
    if key.revoked_ms:
        return f"revoked {_date(key.revoked_ms)}"
    return f"until {_date(key.expires_ms)}" if key.expires_ms else "valid"


def _date(ms: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(ms / 1000))

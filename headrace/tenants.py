"""API keys and what their tenants may do, kept in Redis. A key is shown once; only its digest is stored."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from headrace.errors import HeadraceError
from headrace.keys import API_KEYS, POOLS, Keys, api_key, tenant_policy, tenant_rate, valid_pool
from headrace.lua_source import load_script

MAX_KEYS = 10_000
REVOKED_STAYS_MS = 30 * 86_400_000
_KEY = re.compile(r"sk-hr-([0-9a-f]{12})-[0-9a-f]{48}")
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_Limit = Annotated[int, Meta(ge=0, le=10**12)]


class Policy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tenant may do, over all its keys. 0: no limit; no models: all of them.

    `weight` is its share of a busy pool beside that of others. A month is a calendar month in UTC.
    """

    requests_per_minute: _Limit = 0
    tokens_per_minute: _Limit = 0
    tokens_per_month: _Limit = 0
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    models: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()

    def allows(self, names: frozenset[str]) -> bool:
        """Whether a model known by any of `names` may be asked for."""
        return not self.models or not names.isdisjoint(self.models)


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """An API key as Redis knows it. Times are ms of Redis's clock; 0 means never."""

    id: str
    digest: str
    tenant: str
    name: str = ""
    created_ms: int = 0
    expires_ms: int = 0
    revoked_ms: int = 0

    def is_of(self, secret: str) -> bool:
        """Compares in a time that tells nothing."""
        return hmac.compare_digest(self.digest, digest_of(secret))


class Taken(msgspec.Struct, frozen=True):
    """The state of a tenant's buckets after `take`, which took from both or from neither."""

    taken: bool
    retry_ms: int
    requests_left: int
    requests_full_ms: int
    tokens_left: int
    tokens_full_ms: int


def digest_of(secret: str) -> str:
    """Keys are 192 random bits, so a plain hash cannot be turned around."""
    return hashlib.sha256(secret.encode()).hexdigest()


def key_id_of(secret: str) -> str | None:
    match = _KEY.fullmatch(secret)
    return match[1] if match else None


class TenantStore:
    """All of it raises RedisError as it comes."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def create_key(self, tenant: str, *, name: str = "", ttl_ms: int = 0) -> tuple[str, str]:
        """A new key's id and the key itself, which cannot be had again. Raises HeadraceError."""
        _check_tenant(tenant)
        if len(name) > 100 or not name.isprintable():
            raise HeadraceError("invalid_request", "At most 100 printable characters.", "name")
        key_id = secrets.token_hex(6)
        secret = f"sk-hr-{key_id}-{secrets.token_hex(24)}"
        fields = ["digest", digest_of(secret), "tenant", tenant, "name", name]
        head = [key_id, MAX_KEYS, ttl_ms]
        reply = await self._run("key_create", [API_KEYS, api_key(key_id)], [*head, *fields])
        if reply != b"ok":
            raise HeadraceError("overloaded", f"There are {MAX_KEYS} keys already.")
        return key_id, secret

    async def revoke_key(self, key_id: str) -> bool:
        """False: there is no such key. A revoked key stays in the list for 30 days."""
        reply = await self._run("key_revoke", [API_KEYS, api_key(key_id)], [key_id, REVOKED_STAYS_MS])
        return bool(reply == b"ok")

    async def key(self, key_id: str) -> StoredKey | None:
        raw = await self._redis.hgetall(api_key(key_id))  # type: ignore[misc]
        return _stored_key(key_id, raw)

    async def keys(self) -> list[StoredKey]:
        """All keys there are, oldest first; those that have expired leave the list here."""
        ids = [raw.decode() for raw in await self._redis.zrange(API_KEYS, 0, -1)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for key_id in ids:
                pipe.hgetall(api_key(key_id))
            hashes = await pipe.execute()
        found = [_stored_key(key_id, raw) for key_id, raw in zip(ids, hashes, strict=True)]
        gone = [key_id for key_id, key in zip(ids, found, strict=True) if key is None]
        if gone:
            await self._redis.zrem(API_KEYS, *gone)
        return [key for key in found if key is not None]

    async def any_keys(self) -> bool:
        return bool(await self._redis.exists(API_KEYS))

    async def policy(self, tenant: str) -> Policy:
        """The tenant's own, or the default. One that cannot be read counts as the strictest there is."""
        raw: Any = await self._redis.get(tenant_policy(tenant))
        if raw is None:
            return Policy()
        try:
            return msgspec.json.decode(raw, type=Policy)
        except msgspec.MsgspecError:
            return Policy(requests_per_minute=1, tokens_per_minute=1, models=("-",))

    async def set_policy(self, tenant: str, policy: Policy) -> None:
        """Raises HeadraceError for a tenant's name that is none."""
        _check_tenant(tenant)
        await self._redis.set(tenant_policy(tenant), msgspec.json.encode(policy))
        for raw in await self._redis.smembers(POOLS):  # type: ignore[misc]
            pool = raw.decode(errors="replace")
            if valid_pool(pool):
                await self.set_weight(pool, tenant, policy.weight)

    async def set_weight(self, pool: str, tenant: str, weight: float) -> None:
        """Tells a pool's fair queueing the tenant's share."""
        await self._redis.hset(Keys(pool).vtime, f"w:{tenant}", repr(weight))  # type: ignore[misc]

    async def take(self, tenant: str, policy: Policy, *, requests: int, tokens: int) -> Taken:
        """Takes from the tenant's buckets of a minute each, all or nothing."""
        args = [requests, tokens, policy.requests_per_minute, policy.tokens_per_minute]
        reply = await self._run("admit", [tenant_rate(tenant)], args)
        return Taken(bool(reply[0]), *reply[1:])

    async def _run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        script = load_script(name)
        try:
            return await self._redis.evalsha(script.sha, len(keys), *keys, *args)  # type: ignore[misc]
        except NoScriptError:
            return await self._redis.eval(script.text, len(keys), *keys, *args)  # type: ignore[misc]


def _check_tenant(tenant: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise HeadraceError("invalid_request", "1 to 64 of A-Z a-z 0-9 . _ @ -", "tenant")


def _stored_key(key_id: str, raw: Mapping[bytes, bytes]) -> StoredKey | None:
    text = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
    try:
        return msgspec.convert({**text, "id": key_id}, StoredKey, strict=False)
    except msgspec.ValidationError:
        return None

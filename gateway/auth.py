"""API keys. Only their hashes are kept, and all of them are compared, so that time tells nothing."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from gateway.errors import HttpError
from gateway.tenants import Tenants

TENANT = "headrace_tenant"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's hash and the tenant its jobs belong to; None: the request may name any."""

    digest: bytes
    tenant: str | None


class Keyring:
    """Knows the accepted keys: those of the settings, each `KEY` or `TENANT:KEY`, and those kept in Redis."""

    def __init__(
        self,
        api_keys: tuple[str, ...],
        *,
        allow_anonymous: bool,
        require_key: bool = False,
        tenants: Tenants | None = None,
    ) -> None:
        self._keys = tuple(_parse(text) for text in api_keys)
        self._allow_anonymous = allow_anonymous
        self._require_key = require_key or bool(api_keys)
        self._tenants = tenants

    async def authenticate(self, header: str | None) -> ApiKey | None:
        """The key in `Authorization: Bearer …`; None for an anonymous request.

        Raises HttpError 401, and RedisError when the answer is there and Redis is not.
        """
        secret = _bearer(header)
        if secret is not None and (found := self._find(secret) or await self._stored(secret)):
            return found
        if await self._admits_without(secret):
            return None
        raise HttpError(401, "A valid API key is needed: Authorization: Bearer <key>.")

    async def _admits_without(self, secret: str | None) -> bool:
        """Clients must send some key even to a server without any, so a wrong one may be as good as none."""
        if self._allow_anonymous and secret is None:
            return True
        if self._require_key:
            return False
        return self._tenants is None or not await self._tenants.any_keys()

    def _find(self, secret: str) -> ApiKey | None:
        digest = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    async def _stored(self, secret: str) -> ApiKey | None:
        stored = await self._tenants.key(secret) if self._tenants is not None else None
        return None if stored is None else ApiKey(bytes.fromhex(stored.digest), stored.tenant)


async def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Litestar guard: runs before the body is read."""
    if (encoding := connection.headers.get("content-encoding", "identity")) != "identity":
        raise HttpError(415, f"Bodies are taken as they are, not with Content-Encoding {encoding[:40]!r}.")
    key = await connection.app.state.keyring.authenticate(connection.headers.get("authorization"))
    connection.scope["state"][TENANT] = key.tenant if key else None


def tenant_of(connection: ASGIConnection[Any, Any, Any, Any], asked: str | None) -> str:
    """The tenant a job belongs to: the key's own, or else the one the request names."""
    bound = bound_tenant(connection)
    if bound is not None and asked not in (None, bound):
        raise HttpError(403, "This API key belongs to another tenant.", param="tenant")
    return bound or asked or "default"


def bound_tenant(connection: ASGIConnection[Any, Any, Any, Any]) -> str | None:
    """The tenant of the request's key; None for a key or a client that may act for any."""
    tenant: str | None = connection.scope["state"].get(TENANT)
    return tenant


def may_see(connection: ASGIConnection[Any, Any, Any, Any], tenant: str) -> bool:
    """Whether the request's key opens jobs of `tenant`."""
    return bound_tenant(connection) in (None, tenant)


class Owned(Protocol):
    @property
    def tenant(self) -> str: ...


T = TypeVar("T", bound=Owned)


def own(connection: ASGIConnection[Any, Any, Any, Any], found: T | None, missing: HttpError) -> T:
    """What was looked up. Raises `missing` when there is none; another tenant's is as unknown as that."""
    if found is None or not may_see(connection, found.tenant):
        raise missing
    return found


def _parse(text: str) -> ApiKey:
    tenant, colon, secret = text.partition(":")
    return ApiKey(_digest(secret), tenant) if colon else ApiKey(_digest(text), None)


def _bearer(header: str | None) -> str | None:
    scheme, _, secret = (header or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" and secret.strip() else None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

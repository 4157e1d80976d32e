"""API keys. Only their hashes are kept, and all of them are compared, so that time tells nothing."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from gateway.errors import HttpError

TENANT = "headrace_tenant"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's hash and the tenant its jobs belong to; None: the request may name any."""

    digest: bytes
    tenant: str | None


class Keyring:
    """Knows the accepted keys, each written `KEY` or `TENANT:KEY`."""

    def __init__(self, api_keys: tuple[str, ...], *, allow_anonymous: bool) -> None:
        self._keys = tuple(_parse(text) for text in api_keys)
        self._open = allow_anonymous or not api_keys

    def authenticate(self, header: str | None) -> ApiKey | None:
        """The key in `Authorization: Bearer …`; None for an anonymous request. Raises HttpError 401."""
        secret = _bearer(header)
        if secret is None and self._open:
            return None
        if not self._keys:
            return None  # clients must send some key even to a server without any
        found = self._find(secret or "")
        if found is None:
            raise HttpError(401, "A valid API key is needed: Authorization: Bearer <key>.")
        return found

    def _find(self, secret: str) -> ApiKey | None:
        digest = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


async def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Litestar guard: runs before the body is read."""
    key = connection.app.state.keyring.authenticate(connection.headers.get("authorization"))
    connection.scope["state"][TENANT] = key.tenant if key else None


def tenant_of(connection: ASGIConnection[Any, Any, Any, Any], asked: str | None) -> str:
    """The tenant a job belongs to: the key's own, or else the one the request names."""
    bound = connection.scope["state"].get(TENANT)
    if bound is not None and asked not in (None, bound):
        raise HttpError(403, "This API key belongs to another tenant.", param="tenant")
    return bound or asked or "default"


def may_see(connection: ASGIConnection[Any, Any, Any, Any], tenant: str) -> bool:
    """Whether the request's key opens jobs of `tenant`."""
    return connection.scope["state"].get(TENANT) in (None, tenant)


def _parse(text: str) -> ApiKey:
    tenant, colon, secret = text.partition(":")
    return ApiKey(_digest(secret), tenant) if colon else ApiKey(_digest(text), None)


def _bearer(header: str | None) -> str | None:
    scheme, _, secret = (header or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" and secret.strip() else None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

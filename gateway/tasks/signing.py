"""Signatures by Standard Webhooks (standardwebhooks.com), with a secret for each tenant."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from redis.asyncio import Redis
from standardwebhooks.webhooks import Webhook

from gateway.lua import run_script
from headrace.keys import WEBHOOK_SECRETS


async def tenant_secrets(redis: Redis, tenant: str) -> list[str]:
    """The tenant's secrets as `whsec_…`, newest first. An older one is signed with too, until it is gone."""
    masters = await run_script(redis, "secret", [WEBHOOK_SECRETS], [secrets.token_hex(32)])
    return [_derived(master, tenant) for master in masters]


def _derived(master: bytes, tenant: str) -> str:
    """One tenant's secret tells nothing of another's, so that none can sign in another's name."""
    digest = hmac.new(master, b"webhooks of " + tenant.encode(), hashlib.sha256).digest()
    return "whsec_" + base64.b64encode(digest).decode()


def signed_headers(keys: Sequence[str], delivery_id: str, now_ms: int, body: str) -> dict[str, str]:
    """The three headers a receiver checks; one signature for each secret, separated by spaces."""
    at = datetime.fromtimestamp(now_ms // 1000, UTC)
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(now_ms // 1000),
        "webhook-signature": " ".join(Webhook(key).sign(delivery_id, at, body) for key in keys),
    }

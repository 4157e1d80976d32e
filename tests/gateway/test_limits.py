"""Tenants at the gateway: keys kept in Redis, rates, quotas, models, weights, and the ledger."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import gateway.tenants
from gateway.limits import _span, estimated_tokens
from headrace.keys import this_month
from headrace.tenants import Policy, TenantStore

pytestmark = pytest.mark.redis
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


@pytest.fixture
def store(db: Any) -> TenantStore:
    return TenantStore(db)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asked of Redis is remembered."""
    monkeypatch.setattr(gateway.tenants, "FRESH_S", 0.0)


@pytest.fixture
async def ask(at_once: None, start_gateway: Any, worker: Any, store: TenantStore) -> Any:
    """Sends a chat with a key of `acme`."""
    server = await start_gateway()
    _, secret = await store.create_key("acme")
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=server.url, timeout=20, headers=headers) as client:
        yield client


async def chat(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, **changes})


async def test_the_first_key_closes_the_door(at_once: None, start_gateway: Any, store: TenantStore) -> None:
    server = await start_gateway()
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        assert (await client.get("/v1/models")).status_code == 200
        key_id, secret = await store.create_key("acme")
        assert (await client.get("/v1/models")).status_code == 401
        bearer = {"Authorization": f"Bearer {secret}"}
        assert (await client.get("/v1/models", headers=bearer)).status_code == 200
        wrong = {"Authorization": f"Bearer {secret[:-4]}0000"}
        assert (await client.get("/v1/models", headers=wrong)).status_code == 401
        await store.revoke_key(key_id)
        assert (await client.get("/v1/models", headers=bearer)).status_code == 401


async def test_a_key_is_required_when_told_so(start_gateway: Any) -> None:
    server = await start_gateway(require_key=True)
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        assert (await client.get("/v1/models")).status_code == 401


async def test_jobs_are_the_tenants(ask: httpx.AsyncClient, worker: Any) -> None:
    answer = await chat(ask)
    assert answer.status_code == 200
    assert worker.seen[-1].tenant == "acme"
    assert not any(name.startswith("x-ratelimit") for name in answer.headers)
    assert (await chat(ask, tenant="other")).status_code == 403


async def test_requests_a_minute(ask: httpx.AsyncClient, store: TenantStore) -> None:
    await store.set_policy("acme", Policy(requests_per_minute=2))
    first = await chat(ask, stream=True)  # a stream tells it as well
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert (await chat(ask)).status_code == 200
    refused = await chat(ask)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limited", "rate_limit_error")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await ask.get("/v1/models")).status_code == 200  # only work is limited


async def test_tokens_a_minute_are_estimated(ask: httpx.AsyncClient, store: TenantStore, worker: Any) -> None:
    await store.set_policy("acme", Policy(tokens_per_minute=600))
    first = await chat(ask, max_tokens=400)
    assert first.status_code == 200
    assert 150 <= int(first.headers["x-ratelimit-remaining-tokens"]) < 200
    submitted = len(worker.seen)
    refused = await ask.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 190})
    assert refused.status_code == 429
    assert len(worker.seen) == submitted  # all prompts of a request or none
    assert (await ask.post("/v1/jobs", json={"prompt": "a", "max_tokens": 100})).status_code == 202


async def test_a_quota_of_a_month(ask: httpx.AsyncClient, store: TenantStore, kit: Any) -> None:
    await store.set_policy("acme", Policy(tokens_per_month=5))
    assert (await chat(ask)).status_code == 200  # three of prompt, three of output
    refused = await chat(ask)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


async def test_models(ask: httpx.AsyncClient, store: TenantStore) -> None:
    await store.set_policy("acme", Policy(models=("another",)))
    refused = await chat(ask)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (403, "forbidden", "model")
    assert (await ask.get("/v1/models")).json()["data"] == []
    await store.set_policy("acme", Policy(models=("smollm2",)))
    assert (await chat(ask)).status_code == 200
    assert [model["id"] for model in (await ask.get("/v1/models")).json()["data"]] == ["smollm2"]


async def test_the_weight_is_told_to_the_pool(
    ask: httpx.AsyncClient, store: TenantStore, db: Any, worker: Any
) -> None:
    await store.set_policy("acme", Policy(weight=4))
    await db.delete(worker.keys.vtime)
    assert (await chat(ask)).status_code == 200
    assert await db.hget(worker.keys.vtime, "w:acme") == b"4.0"


async def test_the_ledger(ask: httpx.AsyncClient) -> None:
    await chat(ask)
    used = (await ask.get("/v1/usage")).json()
    assert used == {
        "tenant": "acme",
        "month": this_month(),
        "jobs": 1,
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "output_tokens": 3,
        "wasted_tokens": {"cancelled": 0, "failed": 0, "recomputed": 0},
    }
    assert (await ask.get("/v1/usage", params={"tenant": "other"})).status_code == 403
    assert (await ask.get("/v1/usage", params={"month": "2026-1"})).status_code == 400
    assert (await ask.get("/v1/usage", params={"month": "2001-01"})).json()["jobs"] == 0


@pytest.mark.parametrize(("ms", "text"), [(20, "20ms"), (1500, "1.5s"), (60_000, "1m0s"), (372_900, "6m12s")])
def test_spans_are_written_as_openai_does(ms: int, text: str) -> None:
    assert _span(ms) == text


def test_what_a_job_may_come_to() -> None:
    assert estimated_tokens({"prompt": "x" * 40, "max_tokens": 5, "n": 2}) == 10 + 1 + 10
    assert estimated_tokens({"messages": b"[]"}) == 1 + 1 + 256


async def test_the_metrics_of_tenants(ask: httpx.AsyncClient, store: TenantStore) -> None:
    text = (await ask.get("/metrics")).text
    assert 'headrace_gateway_limited_total{reason="quota"} 0.0' in text
    assert 'headrace_gateway_tenant_used{kind="output",tenant="acme"} 0.0' in text
    await chat(ask)
    await store.set_policy("acme", Policy(models=("another",)))
    await chat(ask)
    text = (await ask.get("/metrics")).text
    assert 'headrace_gateway_tenant_used{kind="output",tenant="acme"} 3.0' in text
    assert 'headrace_gateway_limited_total{reason="model"} 1.0' in text

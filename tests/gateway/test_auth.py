"""API keys, tenants, and what listens without them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.auth import Keyring
from gateway.errors import HttpError

ASK = {"messages": [{"role": "user", "content": "x"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def locked(start_gateway: Any) -> Any:
    gateway = await start_gateway(api_keys=("sk-open", "alice:sk-alice"))
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        yield client


@pytest.mark.redis
async def test_nothing_of_v1_without_a_key(locked: httpx.AsyncClient) -> None:
    headers: list[dict[str, str]] = [{}, bearer("sk-wrong"), {"Authorization": "Basic sk-open"}]
    paths = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/models"),
        ("GET", "/v1/jobs/x"),
    ]
    for header in headers:
        for method, path in paths:
            answer = await locked.request(method, path, headers=header)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert (await locked.get("/healthz")).status_code == 200
    assert (await locked.get("/readyz")).status_code == 200


@pytest.mark.redis
async def test_a_key_of_a_tenant(locked: httpx.AsyncClient, worker: Any) -> None:
    answer = await locked.post("/v1/chat/completions", json=ASK, headers=bearer("sk-alice"))
    assert answer.status_code == 200
    assert worker.seen[-1].tenant == "alice"
    body = {**ASK, "tenant": "bob"}
    answer = await locked.post("/v1/chat/completions", json=body, headers=bearer("sk-alice"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "tenant")
    assert (
        await locked.post("/v1/chat/completions", json=body, headers=bearer("sk-open"))
    ).status_code == 200
    assert worker.seen[-1].tenant == "bob"


@pytest.mark.redis
async def test_a_tenant_sees_only_its_own_jobs(locked: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "tenant": "bob"}
    job_id = (await locked.post("/v1/jobs", json=body, headers=bearer("sk-open"))).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        answer = await locked.request(method, f"/v1/jobs/{job_id}{path}", headers=bearer("sk-alice"))
        assert answer.status_code == 404
    assert (await locked.get(f"/v1/jobs/{job_id}", headers=bearer("sk-open"))).json()["status"] == "queued"


async def test_keys_are_optional_where_everybody_is_welcome() -> None:
    ring = Keyring(("alice:a",), allow_anonymous=True)
    assert await ring.authenticate(None) is None
    found = await ring.authenticate("Bearer a")
    assert found is not None
    assert found.tenant == "alice"
    with pytest.raises(HttpError):
        await ring.authenticate("Bearer b")


async def test_a_server_without_keys_takes_any() -> None:
    assert await Keyring((), allow_anonymous=False).authenticate("Bearer whatever") is None


async def test_a_server_that_waits_for_its_first_key_takes_none() -> None:
    with pytest.raises(HttpError):
        await Keyring((), allow_anonymous=False, require_key=True).authenticate(None)

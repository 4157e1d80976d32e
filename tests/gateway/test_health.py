"""Probes, metrics and the OpenAPI document."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import ERRORS

pytestmark = pytest.mark.redis
PACE = {"pace:token_ms": 100, "pace:output": 9, "pace:cost": 1000, "pace:ms": 1000}


async def samples(http: httpx.AsyncClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {
        (s.name.removeprefix("headrace_gateway_"), tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


async def test_every_series_is_there_from_the_start(http: httpx.AsyncClient) -> None:
    found = await samples(http)
    for code in ERRORS:
        assert found["errors_total", (("code", code),)] == 0
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert found["ttft_seconds_count", (("route", route),)] == 0
        assert found["e2e_seconds_count", (("route", route),)] == 0
    document = (await http.get("/schema/openapi.json")).json()
    routes = [route for route in document["paths"] if route.startswith("/v1/")]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/files", "/v1/batches", "/v1/jobs/{job_id}"} <= {
        *routes
    }
    for route in (*routes, "other"):
        assert found["requests_total", (("route", route), ("status", "200"))] == 0
    for job_class in ("high", "normal", "low"):
        assert found["queue_entries", (("class", job_class), ("pool", "smollm2"))] == 0
    assert found["streams_in_flight", ()] == 0
    assert found["redis_up", ()] == 1
    assert found["workers", (("pool", "smollm2"),)] == 0


async def test_what_is_counted(http: httpx.AsyncClient, worker: Any, kit: Any) -> None:
    ask = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    await http.post("/v1/chat/completions", json=ask)
    await http.post("/v1/chat/completions", json={**ask, "stream": True})
    await http.post("/v1/chat/completions", json={})

    async def known() -> bool:
        return (await samples(http))["workers", (("pool", "smollm2"),)] == 1

    await kit.eventually(known)
    found = await samples(http)
    chat = ("route", "/v1/chat/completions")
    assert found["requests_total", (chat, ("status", "200"))] == 2
    assert found["requests_total", (chat, ("status", "400"))] == 1
    assert found["ttft_seconds_count", (chat,)] == found["e2e_seconds_count", (chat,)] == 2
    assert found["errors_total", (("code", "invalid_request"),)] == 1
    assert found["completion_tokens_total", ()] == 6


async def test_the_queues_depth(http: httpx.AsyncClient) -> None:
    for _ in range(3):
        await http.post("/v1/jobs", json={"prompt": "x", "class": "low"})
    assert (await samples(http))["queue_entries", (("class", "low"), ("pool", "smollm2"))] == 3


async def test_what_strict_deadlines_would_have_refused(http: httpx.AsyncClient, db: Any, kit: Any) -> None:
    await db.hset(kit.Keys("smollm2").vtime, mapping=PACE)
    for ttl_ms in (100, 60_000):
        await http.post("/v1/jobs", json={"prompt": "x", "max_tokens": 9, "ttl_ms": ttl_ms})
    found = await samples(http)
    told = {
        k: found["deadline_estimates", (("kind", k), ("pool", "smollm2"))] for k in ("jobs", "late", "wrong")
    }
    assert told == {"jobs": 2, "late": 1, "wrong": 0}


async def test_ready_tells_pools_and_workers(http: httpx.AsyncClient, worker: Any, db: Any, kit: Any) -> None:
    await db.sadd("hr:pools", "other", "not a pool", b"\xff")

    async def present() -> Any:
        answer = await http.get("/readyz")
        return answer.json() if answer.json()["pools"]["smollm2"]["workers"] else None

    body = await kit.eventually(present)
    assert (body["ready"], body["redis"]) == (True, True)
    assert body["pools"] == {
        "smollm2": {"models": ["smollm2"], "workers": ["w1"]},
        "other": {"models": ["other"], "workers": []},
    }


async def test_models_and_routing_by_a_workers_name_for_it(http: Any, db: Any, kit: Any) -> None:
    keys = kit.Keys("big")
    await db.sadd("hr:pools", "big")
    await db.hset(keys.worker("w9"), mapping={"model": "org/Big-Model"})
    await db.zadd(keys.workers, {"w9": 4e12})

    async def listed() -> Any:
        models = (await http.get("/v1/models")).json()["data"]
        return {model["id"]: model["pool"] for model in models} if len(models) > 1 else None

    assert await kit.eventually(listed) == {
        "smollm2": "smollm2",
        "big": "big",
        "org/Big-Model": "big",
    }
    assert (await http.get("/v1/models/org/Big-Model")).json()["pool"] == "big"
    assert (await http.get("/v1/models/none")).status_code == 404
    job = (await http.post("/v1/jobs", json={"prompt": "x", "model": "org/Big-Model"})).json()
    assert job["pool"] == "big"
    assert (await http.get(f"/v1/jobs/{job['id']}")).json()["status"] == "queued"
    assert (await http.get(f"/v1/jobs/{job['id']}", params={"pool": "smollm2"})).status_code == 404


async def test_the_openapi_document(http: httpx.AsyncClient) -> None:
    document = (await http.get("/schema/openapi.json")).json()
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "JobRequest" in str(body)
    schemas = document["components"]["schemas"]
    assert {"class", "ttl_ms", "prompt_token_ids"} <= schemas["JobRequest"]["properties"].keys()
    assert schemas["ChatRequest"]["required"] == ["messages"]
    errors = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "429", "503"} <= errors.keys()

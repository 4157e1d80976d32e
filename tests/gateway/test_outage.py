"""Redis away, frozen, restarted, emptied: quick refusals, streams that go on, and recovery alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.redis, pytest.mark.alone]  # refused at once: by the clock
ASK = {"messages": [{"role": "user", "content": "x"}], "stream": True}


async def assert_refused_at_once(http: httpx.AsyncClient, path: str, body: Any) -> None:
    started_s = time.monotonic()
    answer = await http.post(path, json=body)
    assert time.monotonic() - started_s < 2
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == "1"


async def test_a_gateway_that_starts_before_redis(redis_server: Any, start_gateway: Any, kit: Any) -> None:
    redis_server.kill()
    gateway = await start_gateway()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        await assert_refused_at_once(http, "/v1/chat/completions", ASK)
        await assert_refused_at_once(http, "/v1/jobs", {"prompt": "x"})
        assert "headrace_gateway_redis_up 0.0" in (await http.get("/metrics")).text
        redis_server.start()

        async def ready() -> bool:
            return bool((await http.get("/readyz")).status_code == 200)

        await kit.eventually(ready)
        assert (await http.post("/v1/jobs", json={"prompt": "x"})).status_code == 202


@pytest.mark.parametrize("known_before", [True, False])
async def test_a_frozen_redis(redis_server: Any, http: Any, db: Any, kit: Any, known_before: bool) -> None:
    if known_before:
        assert (await http.get("/v1/models")).status_code == 200
    redis_server.pause()
    try:
        await asyncio.gather(
            *(assert_refused_at_once(http, "/v1/chat/completions", ASK) for _ in range(20)),
            *(assert_refused_at_once(http, "/v1/jobs", {"prompt": "x"}) for _ in range(20)),
        )
        assert (await http.get("/readyz")).status_code == 503
    finally:
        redis_server.resume()

    async def none_waits() -> bool:
        # What was carried out after all has been cancelled: nobody knows its id.
        jobs = [await db.hmget(key, "status", "cancel") for key in await db.keys("hr:*:job:*")]
        return all(status in (None, b"cancelled") or cancel for status, cancel in jobs)

    await asyncio.sleep(1.5)
    await kit.eventually(none_waits, timeout_s=15)
    assert (await http.post("/v1/jobs", json={"prompt": "x"})).status_code == 202


@pytest.mark.parametrize("asked", [{}, {"id": "mine"}])
async def test_a_lost_reply(
    gateway: Any, http: Any, worker: Any, db: Any, kit: Any, monkeypatch: Any, asked: dict[str, str]
) -> None:
    """A job whose id nobody knows must not run; one whose id is its producer's own may be sent again."""
    store = gateway.app.state.gateway.store
    submit, lost = store.submit, []

    async def submit_and_lose(job: Any) -> Any:
        lost.append(await submit(job))
        raise ConnectionError("the reply is lost")

    worker.gate.clear()
    monkeypatch.setattr(store, "submit", submit_and_lose)
    await assert_refused_at_once(http, "/v1/jobs", {"prompt": "x", **asked})
    monkeypatch.undo()
    key = kit.Keys("smollm2").job(lost[0].id)
    if not asked:
        await kit.eventually(lambda: db.hget(key, "cancel"))
        return
    assert (await http.post("/v1/jobs", json={"prompt": "x", **asked})).status_code == 202
    await asyncio.sleep(0.3)  # an id that nobody knows has been cancelled by then
    worker.gate.set()
    assert (await http.get("/v1/jobs/mine", params={"wait": 20})).json()["status"] == "done"


async def test_a_stream_lives_through_a_restart(redis_server: Any, gateway: Any, http: Any, kit: Any) -> None:
    answer = await http.post("/v1/jobs", json={"prompt": "x", "ttl_ms": 4000})
    url = f"/v1/jobs/{answer.json()['id']}/events"

    async def follow() -> str:
        return str((await http.get(url)).text)

    following = asyncio.create_task(follow())

    async def subscribed() -> Any:
        with redis_server.client() as client:
            return client.pubsub_channels()

    await kit.eventually(subscribed)
    redis_server.restart()
    text = await following
    assert "deadline_exceeded" in text
    assert text.count("event: end") == 1


async def test_a_stream_whose_job_is_gone_says_so(http: Any, worker: Any, db: Any, kit: Any) -> None:
    worker.step_s = 0.01
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 100_000}
    async with asyncio.timeout(20), http.stream("POST", "/v1/chat/completions", json=body) as answer:
        text, emptied = "", False
        async for piece in answer.aiter_text():
            text += piece
            if "a3 " in text and not emptied:
                emptied = True
                worker.running.clear()
                await db.flushall()
    assert '"code":"lost"' in text
    assert "[DONE]" not in text


async def test_heartbeats_while_a_job_waits(start_gateway: Any) -> None:
    gateway = await start_gateway(heartbeat_s=0.05)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        seen = ""
        async with http.stream("POST", "/v1/chat/completions", json=ASK) as answer:
            async for piece in answer.aiter_text():
                seen += piece
                if seen.count(": ping\n\n") >= 3:
                    break
        assert seen.startswith(": headrace\n\n")


async def test_scripts_that_were_flushed(http: Any, worker: Any, db: Any) -> None:
    for _ in range(3):
        await db.script_flush()
        body = {"prompt": "x", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_a_full_redis(http: Any, db: Any) -> None:
    await http.get("/v1/models")
    await db.config_set("maxmemory", "1mb")
    try:
        answer = await http.post("/v1/jobs", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    finally:
        await db.config_set("maxmemory", "0")
    assert (await http.post("/v1/jobs", json={"prompt": "x"})).status_code == 202

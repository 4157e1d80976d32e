"""Readers of a job whenever they come, ids that are used again, and cleaning up while Redis hangs."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.redis


async def submit(http: httpx.AsyncClient, **fields: Any) -> str:
    answer = await http.post("/v1/jobs", json={"prompt": "x", **fields})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def seqs_and_text(http: httpx.AsyncClient, job_id: str, **query: Any) -> tuple[list[int], str]:
    answer = await http.get(f"/v1/jobs/{job_id}/events", params=query)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return [event["seq"] for event in events], "".join(event.get("text", "") for event in events)


async def test_a_reader_may_come_at_any_moment(http: Any, worker: Any, kit: Any, redis_server: Any) -> None:
    """Before the first token, between any two, after the last; also while the server stalls now and then."""
    seed = random.Random(2)

    async def one() -> None:
        job_id = await submit(http, max_tokens=6)
        await asyncio.sleep(seed.random() * 0.05)
        assert await seqs_and_text(http, job_id) == (list(range(1, 9)), kit.text_of(0, 6))

    async def stalls() -> None:
        while True:
            await asyncio.sleep(seed.random() * 0.2)
            redis_server.pause()
            await asyncio.sleep(0.02)
            redis_server.resume()

    stalling = asyncio.create_task(stalls())
    try:
        for _ in range(3):
            await asyncio.gather(*(one() for _ in range(25)))
    finally:
        stalling.cancel()
        await asyncio.gather(stalling, return_exceptions=True)
        redis_server.resume()


@pytest.mark.parametrize("ending", ["done", "failed", "cancelled"])
async def test_who_comes_after_the_end_is_told_it(
    http: httpx.AsyncClient, worker: Any, kit: Any, ending: str
) -> None:
    job_id = await submit(http, prompt="fail non_finite" if ending == "failed" else "x", max_tokens=3)
    if ending == "cancelled":
        await http.delete(f"/v1/jobs/{job_id}")
    assert (await http.get(f"/v1/jobs/{job_id}", params={"wait": 10})).json()["status"] in (ending, "done")
    async with asyncio.timeout(5):
        text = (await http.get(f"/v1/jobs/{job_id}/events")).text
    assert text.count("event: end\n") == 1
    assert text.rstrip().splitlines()[-1].startswith('data: {"type":"end"')


@pytest.mark.parametrize(
    ("job_id", "status"), [("job_never", 404), ("normal-1-1", 404), ("a%20b", 400), ("x" * 129, 400)]
)
async def test_who_follows_nothing_is_told_at_once(http: httpx.AsyncClient, job_id: str, status: int) -> None:
    async with asyncio.timeout(5):
        answer = await http.get(f"/v1/jobs/{job_id}/events")
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")


async def test_cancelling_nothing_does_not_cancel_what_comes_later(
    http: httpx.AsyncClient, worker: Any
) -> None:
    assert (await http.delete("/v1/jobs/mine")).status_code == 404
    await submit(http, id="mine", max_tokens=2)
    assert (await http.get("/v1/jobs/mine", params={"wait": 10})).json()["status"] == "done"


async def test_an_id_used_again_after_its_time_has_nothing_of_the_first(
    http: httpx.AsyncClient, worker: Any, kit: Any, db: Any
) -> None:
    await submit(http, id="mine", max_tokens=5)
    assert (await seqs_and_text(http, "mine"))[0] == list(range(1, 8))
    await db.delete(worker.keys.job("mine"), worker.keys.log("mine"))  # as their expiry does
    await submit(http, id="mine", max_tokens=2)
    assert await seqs_and_text(http, "mine") == ([1, 2, 3, 4], kit.text_of(0, 2))
    stale = await http.get("/v1/jobs/mine/events", headers={"Last-Event-ID": "7"})
    assert stale.status_code == 400


async def test_a_stream_is_not_begun_while_redis_hangs(http: Any, redis_server: Any) -> None:
    job_id = await submit(http)
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    redis_server.pause()
    try:
        async with asyncio.timeout(5):
            answers = await asyncio.gather(
                http.post("/v1/chat/completions", json=chat),
                http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "0"}),
            )
    finally:
        redis_server.resume()
    for answer in answers:
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
        assert answer.headers["retry-after"]


async def test_a_crowd_that_vanishes_while_redis_hangs(
    gateway: Any, http: Any, worker: Any, db: Any, kit: Any, redis_server: Any
) -> None:
    """What is to be cleaned up waits until it can be, and none of it is forgotten."""
    worker.step_s = 0.01
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 100_000}
    raw = json.dumps(chat).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    writers = []
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head + raw)
        writers.append(writer)
        await asyncio.wait_for(reader.readuntil(b'"content":"a0 "'), 10)
    redis_server.pause()
    try:
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(2)
    finally:
        redis_server.resume()

    async def quiet() -> bool:
        return not worker.running and await kit.channels(db) == []

    await kit.eventually(quiet, timeout_s=20)
    assert "headrace_gateway_streams_in_flight 0.0" in (await http.get("/metrics")).text
    states = {await db.hget(key, "status") for key in await db.keys(worker.keys.job("*"))}
    assert states == {b"cancelled"}

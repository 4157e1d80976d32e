"""Clients that leave: what becomes of their jobs, and that nothing of them stays behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from gateway.disconnect import OnDisconnect, parse_on_disconnect
from headrace.errors import HeadraceError

pytestmark = pytest.mark.redis
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(gateway: Any, method: str, path: str, body: Any = None) -> Connection:
    """A request as curl writes it, on a socket of its own."""
    raw = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def long_chat(**options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "max_tokens": 100_000, "stream": True, **options}


async def the_job(worker: Any, kit: Any) -> str:
    async def claimed() -> Any:
        return worker.seen

    return str((await kit.eventually(claimed))[0].id)


async def has_status(http: Any, kit: Any, job_id: str, status: str) -> None:
    async def reached() -> bool:
        return bool((await http.get(f"/v1/jobs/{job_id}")).json()["status"] == status)

    await kit.eventually(reached)


async def test_leaving_a_chat_cancels_its_job(
    gateway: Any, http: Any, worker: Any, db: Any, kit: Any
) -> None:
    worker.step_s = 0.005
    reader, writer = await send(gateway, "POST", "/v1/chat/completions", long_chat())
    await reader.readuntil(b'"content":"a5 "')
    reset(writer)
    await has_status(http, kit, await the_job(worker, kit), "cancelled")

    async def silent() -> bool:
        return await kit.channels(db) == []

    await kit.eventually(silent)


async def test_leaving_while_the_job_waits(gateway: Any, http: Any, db: Any, kit: Any) -> None:
    reader, writer = await send(gateway, "POST", "/v1/chat/completions", long_chat())
    head = await reader.readuntil(b": headrace\n\n")
    job_id = next(line for line in head.decode().split("\r\n") if line.startswith("x-headrace-jobs")).split()[
        1
    ]
    reset(writer)

    async def flagged() -> Any:
        job = kit.Keys(kit.POOL).job(job_id)
        return await db.hget(job, "cancel") or await db.hget(job, "status") == b"cancelled"

    await kit.eventually(flagged)


async def test_leaving_an_answer_that_is_not_streamed(gateway: Any, http: Any, worker: Any, kit: Any) -> None:
    worker.step_s = 0.005
    _, writer = await send(gateway, "POST", "/v1/chat/completions", long_chat(stream=False))
    job_id = await the_job(worker, kit)
    reset(writer)
    await has_status(http, kit, job_id, "cancelled")


async def test_a_job_told_to_go_on_does(gateway: Any, http: Any, worker: Any, kit: Any) -> None:
    worker.step_s = 0.002
    body = long_chat(max_tokens=200, on_disconnect="continue")
    reader, writer = await send(gateway, "POST", "/v1/chat/completions", body)
    await reader.readuntil(b'"content":"a5 "')
    reset(writer)
    done = await http.get(f"/v1/jobs/{await the_job(worker, kit)}", params={"wait": 20})
    assert done.json()["result"]["choices"][0]["text"] == kit.text_of(0, 200)


async def test_leaving_the_events_of_a_job(gateway: Any, http: Any, worker: Any, kit: Any) -> None:
    worker.step_s = 0.005
    body = {"prompt": "x", "max_tokens": 100_000, "on_disconnect": "cancel"}
    job_id = (await http.post("/v1/jobs", json=body)).json()["id"]
    await the_job(worker, kit)
    reader, writer = await send(gateway, "GET", f"/v1/jobs/{job_id}/events")
    await reader.readuntil(b"id: 3\n")
    reset(writer)
    await has_status(http, kit, job_id, "cancelled")


async def test_somebody_who_still_reads_keeps_the_job_alive(
    gateway: Any, http: Any, worker: Any, kit: Any
) -> None:
    worker.step_s = 0.005
    body = {"prompt": "x", "max_tokens": 150, "on_disconnect": "cancel"}
    job_id = (await http.post("/v1/jobs", json=body)).json()["id"]
    await the_job(worker, kit)
    first, leaving = await send(gateway, "GET", f"/v1/jobs/{job_id}/events")
    second, staying = await send(gateway, "GET", f"/v1/jobs/{job_id}/events")
    await asyncio.gather(first.readuntil(b"id: 3\n"), second.readuntil(b"id: 3\n"))
    reset(leaving)
    await second.readuntil(b'"status":"done"')
    staying.close()


async def test_a_grace_in_which_the_client_returns(gateway: Any, http: Any, worker: Any, kit: Any) -> None:
    worker.step_s = 0.005
    body = {"prompt": "x", "max_tokens": 300, "on_disconnect": "cancel_after:0.5"}
    job_id = (await http.post("/v1/jobs", json=body)).json()["id"]
    await the_job(worker, kit)
    reader, writer = await send(gateway, "GET", f"/v1/jobs/{job_id}/events")
    await reader.readuntil(b"id: 3\n")
    reset(writer)
    reader, writer = await send(gateway, "GET", f"/v1/jobs/{job_id}/events?after=3")
    await reader.readuntil(b'"status":"done"')
    writer.close()


@pytest.mark.parametrize("frozen", [False, True])
async def test_crowds_that_vanish_leave_nothing_behind(
    gateway: Any, http: Any, db: Any, worker: Any, kit: Any, redis_server: Any, frozen: bool
) -> None:
    """Also while Redis answers nobody, so that cleaning up has to wait."""
    worker.step_s = 0.005
    seed = random.Random(1)

    async def vanish() -> None:
        _, writer = await send(gateway, "POST", "/v1/chat/completions", long_chat())
        await asyncio.sleep(seed.random() * 0.3)
        reset(writer)

    for _ in range(1 if frozen else 5):
        crowd = asyncio.gather(*(vanish() for _ in range(30)))
        if frozen:
            await asyncio.sleep(0.15)  # some have a stream by now, some have not
            redis_server.pause()
            await asyncio.sleep(1.5)
            redis_server.resume()
        await crowd

    async def quiet() -> bool:
        metrics = (await http.get("/metrics")).text
        return (
            await kit.channels(db) == []
            and "headrace_gateway_streams_in_flight 0.0" in metrics
            and not worker.running
        )

    await kit.eventually(quiet, timeout_s=20)
    assert len(await db.client_list()) < 30


@pytest.mark.parametrize(
    ("text", "grace_s"), [("continue", None), ("cancel", 0.0), ("cancel_after:1.5", 1.5), (None, 0.0)]
)
def test_policies(text: str | None, grace_s: float | None) -> None:
    assert parse_on_disconnect(text, "cancel") == OnDisconnect(grace_s)


@pytest.mark.parametrize("text", ["", "stop", "cancel_after", "cancel_after:-1", "cancel_after:1e9"])
def test_policies_nobody_knows(text: str) -> None:
    with pytest.raises(HeadraceError, match="on_disconnect"):
        parse_on_disconnect(text, "cancel")

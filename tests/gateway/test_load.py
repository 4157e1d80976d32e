"""Many readers, slow readers: bounded connections, bounded memory, nobody held up by another."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

import gateway.stream as gateway_stream

pytestmark = pytest.mark.redis


async def test_many_streams_and_pollers_on_few_connections(
    gateway: Any, http: Any, worker: Any, db: Any, kit: Any
) -> None:
    worker.gate.clear()
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits) as client:
        jobs = [client.post("/v1/jobs", json={"prompt": "x", "max_tokens": 3}) for _ in range(60)]
        ids = [answer.json()["id"] for answer in await asyncio.gather(*jobs)]
        streams = [asyncio.create_task(client.get(f"/v1/jobs/{job_id}/events")) for job_id in ids]
        polls = [asyncio.create_task(client.get(f"/v1/jobs/{job_id}", params={"wait": 50})) for job_id in ids]

        async def all_subscribed() -> bool:
            return len(await kit.channels(db)) == 60

        await kit.eventually(all_subscribed, timeout_s=20)
        assert len(await db.client_list()) < 40
        worker.gate.set()
        answers = await asyncio.gather(*streams, *polls)
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.text.count("event: end") == 1 for answer in answers[:60])
    assert {answer.json()["status"] for answer in answers[60:]} == {"done"}

    async def quiet() -> bool:
        return await kit.channels(db) == []

    await kit.eventually(quiet)


async def test_a_reader_that_stops_reading_holds_up_nobody(
    gateway: Any, http: Any, worker: Any, kit: Any
) -> None:
    worker.padding = "x" * 20_000  # 20 MB in all: more than the kernel's buffers take
    job_id = (await http.post("/v1/jobs", json={"prompt": "x", "max_tokens": 1000})).json()["id"]
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", gateway.port))
    await loop.sock_sendall(slow, f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    fast = await http.get(f"/v1/jobs/{job_id}/events", timeout=60)
    assert fast.text.count("event: delta") == 1000
    assert "headrace_gateway_streams_in_flight 1.0" in (await http.get("/metrics")).text
    await asyncio.sleep(gateway_stream.LAGGING_S)  # what makes a reader a slow one
    seen = bytearray()
    while not seen.endswith(b"0\r\n\r\n"):
        async with asyncio.timeout(20):
            piece = await loop.sock_recv(slow, 1 << 20)
        assert piece
        seen += piece
    slow.close()
    assert b": lagging\n\n" in seen
    assert ": lagging" not in fast.text
    ids = [line for line in bytes(seen).split(b"\n") if line.startswith(b"id: ")]
    assert ids == [b"id: %d" % seq for seq in range(1, 1003)]


async def test_a_thousand_streams_at_once(gateway: Any, http: Any, worker: Any, db: Any, kit: Any) -> None:
    worker.gate.clear()
    job_id = (await http.post("/v1/jobs", json={"prompt": "x", "max_tokens": 3})).json()["id"]
    streams = []

    async def all_open() -> bool:
        return f"headrace_gateway_streams_in_flight {len(streams)}.0" in (await http.get("/metrics")).text

    streams.append(asyncio.create_task(_read_all(gateway.port, job_id)))
    await kit.eventually(all_open)
    connections = len(await db.client_list())  # those that the first stream needs included
    streams += [asyncio.create_task(_read_all(gateway.port, job_id)) for _ in range(999)]
    await kit.eventually(all_open, timeout_s=90)
    assert len(await db.client_list()) <= connections + 16
    assert len(await kit.channels(db)) == 1  # one subscription, however many read
    worker.gate.set()
    bodies = await asyncio.gather(*streams)
    assert len(set(bodies)) == 1
    assert [line for line in bodies[0].split(b"\n") if line.startswith(b"id: ")] == [
        b"id: %d" % seq for seq in range(1, 6)
    ]

    async def quiet() -> bool:
        none_open = "headrace_gateway_streams_in_flight 0.0" in (await http.get("/metrics")).text
        return none_open and await kit.channels(db) == []

    await kit.eventually(quiet)


async def _read_all(port: int, job_id: str) -> bytes:
    """What a stream says, without the heartbeats that a busy machine lets in."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    body = (await reader.read()).split(b"\r\n\r\n", 1)[1]
    writer.close()
    await writer.wait_closed()
    return body.replace(b"%x\r\n%b\r\n" % (len(gateway_stream.PING), gateway_stream.PING), b"")

"""HTTP as such: addresses, methods, encodings, bodies and heads that are too long, too slow or cut off."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from gateway import protocol

pytestmark = pytest.mark.redis
CHAT = "/v1/chat/completions"
ASK = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(gateway: Any, raw: bytes) -> Raw:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw)
    return reader, writer


def error(answer: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()["error"]
    return body


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/embeddings"), ("GET", "/"), ("POST", "/v1/jobs/x/cancel")]
)
async def test_what_is_not_served_is_named(http: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await http.request(method, path, json={"input": "x"})
    assert (answer.status_code, error(answer)["code"]) == (404, "not_found")
    assert f"{method} {path}" in error(answer)["message"]
    assert "/schema/openapi.json" in error(answer)["message"]


async def test_a_method_that_is_not_served(http: httpx.AsyncClient) -> None:
    answer = await http.get(CHAT)
    assert (answer.status_code, error(answer)["code"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["allow"]
    assert f"GET {CHAT}" in error(answer)["message"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_may_ask_for_the_head_alone(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


async def test_scripts_of_other_pages_may_not_ask_unless_told_so(start_gateway: Any, worker: Any) -> None:
    page = {"Origin": "https://app.example"}
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    allowed = "access-control-allow-origin"
    for origins, admitted in (((), False), (("https://app.example",), True), (("https://b.example",), False)):
        gateway = await start_gateway(cors_origins=origins)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20, headers=page) as client:
            preflight = await client.options(CHAT, headers=asked)
            assert (preflight.headers.get(allowed) == page["Origin"]) == admitted
            if admitted:
                assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
                assert "x-stainless-os" in preflight.headers["access-control-allow-headers"].lower()
            streamed = await client.post(CHAT, json={**json.loads(ASK), "stream": True})
            refused = await client.post(CHAT, json={})
            for answer in (streamed, refused):
                assert (answer.headers.get(allowed) == page["Origin"]) == admitted
            assert streamed.text.endswith("data: [DONE]\n\n")


async def test_a_compressed_body_is_refused(http: httpx.AsyncClient) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = await http.post(CHAT, content=gzip.compress(ASK), headers=headers)
    assert (answer.status_code, error(answer)["code"]) == (415, "unsupported_media_type")
    assert "gzip" in error(answer)["message"]


async def test_a_byte_order_mark_is_skipped(http: httpx.AsyncClient, worker: Any) -> None:
    answer = await http.post(CHAT, content=b"\xef\xbb\xbf" + ASK)
    assert answer.status_code == 200


async def test_a_body_that_is_too_large_is_told_the_limit(start_gateway: Any) -> None:
    gateway = await start_gateway(max_body_bytes=1000)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        answer = await client.post(CHAT, content=b"x" * 1001)
    assert (answer.status_code, error(answer)["code"]) == (413, "too_large")
    assert "1000 bytes" in error(answer)["message"]


async def test_a_client_that_leaves_within_its_body_is_no_failure_of_ours(
    gateway: Any, http: httpx.AsyncClient, kit: Any
) -> None:
    _, writer = await connect(
        gateway, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    )
    await writer.drain()
    writer.transport.abort()

    async def counted() -> bool:
        return 'status="499"' in (await http.get("/metrics")).text

    await kit.eventually(counted)
    assert 'headrace_gateway_errors_total{code="internal"} 0.0' in (await http.get("/metrics")).text


async def test_an_alias_is_named_as_it_is_asked(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/jobs/job_x", params={"wait": 61})
    assert (answer.status_code, error(answer)["param"]) == (400, "wait")
    answer = await http.get("/v1/jobs/a%20b")
    assert (answer.status_code, error(answer)["param"]) == (400, "job_id")
    assert "1 to 128" in error(answer)["message"]


@pytest.mark.parametrize("head", [b"X-Long: " + b"a" * 200_000, b"X-Many: a\r\n" * 20_000])
async def test_a_head_without_end_is_refused(gateway: Any, head: bytes) -> None:
    reader, writer = await connect(gateway, b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + head)
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"too_large"' in answer
    writer.close()


@pytest.mark.parametrize("pieces", [1, 2])
async def test_an_offer_of_http_2_is_declined_and_the_body_read(
    gateway: Any, worker: Any, pieces: int
) -> None:
    """Java's own client makes it with each request."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {len(ASK)}\r\n"
        "Host: x\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n"
    ).encode()
    reader, writer = await connect(gateway, b"")
    for _ in range(2):  # over one connection
        for piece in [head + ASK] if pieces == 1 else [head[:150], head[150:], ASK]:
            writer.write(piece)
            await asyncio.sleep(0.02)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert answer.startswith(b"HTTP/1.1 200 ")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["object"] == "chat.completion"
    writer.close()


async def test_what_is_no_http_is_told_in_the_usual_shape(gateway: Any) -> None:
    reader, writer = await connect(gateway, b"hello\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
    writer.close()


@pytest.mark.parametrize(
    "begun", [b"", b"GET /heal", b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_a_request_that_does_not_go_on_is_given_up(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(protocol, "PATIENCE_S", 0.3)
    reader, writer = await connect(gateway, begun)
    assert await asyncio.wait_for(reader.read(), 10) is not None
    writer.close()


async def test_patience_is_with_requests_not_with_answers(
    gateway: Any, worker: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that goes on slowly is read to its end, and an answer may take as long as it takes."""
    monkeypatch.setattr(protocol, "PATIENCE_S", 0.3)
    worker.gate.clear()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(ASK)}\r\n\r\n"
    reader, writer = await connect(gateway, head.encode())
    for at in range(0, len(ASK), 20):
        await asyncio.sleep(0.1)
        writer.write(ASK[at : at + 20])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.6)
    worker.gate.set()
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200 ")
    writer.close()

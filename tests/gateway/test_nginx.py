"""Streams through nginx with its defaults: it buffers, speaks HTTP/1.0 upstream, gives up after a silence."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.redis
CONFIG = """
daemon off;
error_log {folder}/error.log;
pid {folder}/nginx.pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{upstream};
      {more}
    }}
  }}
}}
"""
CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 5}
Proxied = Callable[..., Any]


@pytest.fixture
async def nginx(tmp_path: Path, redis_server: Any) -> AsyncIterator[Proxied]:
    """Puts an nginx before a port; `more` goes into its location. Gives a client of it."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    free_port = sys.modules[type(redis_server).__module__].free_port
    running: list[subprocess.Popen[bytes]] = []
    clients: list[httpx.AsyncClient] = []

    async def start(upstream: int, more: str = "") -> httpx.AsyncClient:
        port = free_port()
        config = tmp_path / "nginx.conf"
        config.write_text(CONFIG.format(folder=tmp_path, port=port, upstream=upstream, more=more))
        command = [program, "-c", str(config), "-p", str(tmp_path), "-e", str(tmp_path / "error.log")]
        running.append(subprocess.Popen(command))  # noqa: ASYNC220
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20)
        clients.append(client)
        for _ in range(500):
            try:
                assert (await client.get("/healthz")).status_code == 200
                return client
            except httpx.ConnectError:
                await asyncio.sleep(0.02)
        raise AssertionError((tmp_path / "error.log").read_text())

    yield start
    for client in clients:
        await client.aclose()
    for process in running:
        process.terminate()
        process.wait(10)


async def test_the_first_byte_does_not_wait_for_the_last(gateway: Any, worker: Any, nginx: Proxied) -> None:
    client = await nginx(gateway.port)
    worker.gate.clear()
    async with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        pieces = answer.aiter_text()
        async with asyncio.timeout(5):
            assert (await anext(pieces)).startswith(": headrace")
        worker.gate.set()
        text = "".join([piece async for piece in pieces])
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert text.count('"content":"a') == 5
    assert text.endswith("data: [DONE]\n\n")


async def test_tokens_come_one_by_one(gateway: Any, worker: Any, nginx: Proxied) -> None:
    client = await nginx(gateway.port)
    worker.step_s = 0.1
    loop = asyncio.get_running_loop()
    times = []
    async with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        async for line in answer.aiter_lines():
            if '"content":"a' in line:
                times.append(loop.time())
    assert len(times) == 5
    assert times[-1] - times[0] > 0.3  # four steps, and not all at the end


async def test_silence_is_bridged(start_gateway: Any, worker: Any, nginx: Proxied) -> None:
    """The heartbeat comes every 10 s and nginx waits for 60: here both are a thirtieth."""
    gateway = await start_gateway(heartbeat_s=0.33)
    client = await nginx(gateway.port, "proxy_read_timeout 2s;")
    worker.gate.clear()
    async with client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        pieces = answer.aiter_text()
        seen = ""
        while seen.count(": ping") < 9:  # 3 s
            seen += await anext(pieces)
        worker.gate.set()
        seen += "".join([piece async for piece in pieces])
    assert seen.endswith("data: [DONE]\n\n")


async def test_a_client_behind_it_that_leaves_is_noticed(
    gateway: Any, worker: Any, nginx: Proxied, http: Any, kit: Any
) -> None:
    client = await nginx(gateway.port)
    worker.step_s = 0.01
    async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 100_000}) as answer:
        async for line in answer.aiter_lines():
            if '"content":"a3' in line:
                break

    async def cancelled() -> bool:
        return (await http.get(f"/v1/jobs/{worker.seen[0].id}")).json()["status"] == "cancelled"

    await kit.eventually(cancelled)


async def test_resuming_through_it(gateway: Any, worker: Any, nginx: Proxied) -> None:
    client = await nginx(gateway.port)
    job_id = (await client.post("/v1/jobs", json={"prompt": "x", "max_tokens": 5})).json()["id"]
    whole = (await client.get(f"/v1/jobs/{job_id}/events")).text
    rest = (await client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "3"})).text
    assert rest.split("id: 4\n")[1] == whole.split("id: 4\n")[1]
    assert "id: 3\n" not in rest

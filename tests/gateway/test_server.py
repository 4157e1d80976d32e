"""The gateway as a process: how it starts, refuses to start, and stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.redis
COMMAND = [sys.executable, "-m", "gateway"]
NO_REDIS = "redis://127.0.0.1:1/0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**variables: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**ours, **{f"HEADRACE_{name.upper()}": value for name, value in variables.items()}}


def failed_start(*flags: str, **variables: str) -> str:
    done = subprocess.run(
        [*COMMAND, *flags], env=environment(**variables), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def process(redis_url: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    variables = environment(redis_url=redis_url, log_format="json", heartbeat_s="0.1", drain_timeout_s="20")
    started = subprocess.Popen(
        [*COMMAND, "--port", str(port)], env=variables, stderr=subprocess.PIPE, text=True
    )
    wait_until_up(port)
    yield started, port
    started.kill()
    started.wait(10)
    if started.stderr:
        started.stderr.close()


def wait_until_up(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5):
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = failed_start("--port", str(port))
    assert f"HEADRACE_PORT={port}" in message


def test_an_open_door_needs_a_word() -> None:
    assert "HEADRACE_ALLOW_ANONYMOUS" in failed_start(host="0.0.0.0")


def test_sigterm_lets_an_open_stream_end(process: Any, redis_server: Any) -> None:
    started, port = process
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        body = json.dumps({"prompt": "a secret", "stream": True, "ttl_ms": 2000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        seen = b""
        while b": ping" not in seen:
            seen += client.recv(4096)
        started.send_signal(signal.SIGTERM)
        while piece := client.recv(4096):
            seen += piece
    assert b"deadline_exceeded" in seen
    assert seen.endswith(b"0\r\n\r\n")
    _, logs = started.communicate(timeout=20)
    assert started.returncode == 0
    assert "a secret" not in logs
    said = {line["event"]: line for line in map(json.loads, logs.splitlines())}
    assert (said["draining"]["open_requests"], said["draining"]["limit_s"]) == (1, 20.0)
    assert said["stopped"]["ended_requests"] == 0


ASKS = {
    "chat": (
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "stream": True},
    ),
    "whole": ("POST", "/v1/completions", {"prompt": "x"}),
    "response": ("POST", "/v1/responses", {"input": "x", "stream": True}),
    "whole response": ("POST", "/v1/responses", {"input": "x"}),
    "events": ("GET", "/v1/jobs/mine/events", None),
    "poll": ("GET", "/v1/jobs/mine?wait=60", None),
}


async def stopped_while_asked(
    started: subprocess.Popen[str], port: int, signals: list[signal.Signals], db: Any, kit: Any
) -> dict[str, httpx.Response]:
    async def all_followed() -> bool:
        return len(await kit.channels(db)) == 5  # two look at one job

    async def closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        await http.post("/v1/jobs", json={"prompt": "x", "id": "mine"})
        asked = {
            name: asyncio.create_task(http.request(method, path, json=body))
            for name, (method, path, body) in ASKS.items()
        }
        await kit.eventually(all_followed)
        for number in signals:
            started.send_signal(number)
            await kit.eventually(closed)
        return {name: await task for name, task in asked.items()}


@pytest.mark.parametrize(
    ("signals", "drain_s"),
    [([signal.SIGTERM], 0.5), ([signal.SIGINT], 0.5), ([signal.SIGINT] * 2, 60), ([signal.SIGTERM] * 2, 60)],
)
async def test_what_is_still_open_when_the_time_is_over_is_told(
    redis_url: str, db: Any, kit: Any, signals: list[signal.Signals], drain_s: float
) -> None:
    port = free_port()
    variables = environment(
        redis_url=redis_url, log_format="json", drain_timeout_s=str(drain_s), port=str(port)
    )
    with subprocess.Popen(COMMAND, env=variables, stderr=subprocess.PIPE, text=True) as started:  # noqa: ASYNC220
        try:
            wait_until_up(port)
            answers = await stopped_while_asked(started, port, signals, db, kit)
            _, logs = await asyncio.to_thread(started.communicate, None, 20)
        finally:
            started.kill()
    assert started.returncode == 0
    for name in ("whole", "whole response", "poll"):
        answer = answers[name]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable"), name
        assert answer.headers["retry-after"]
    for name, begin in (("chat", "data: {"), ("response", "event: error\n"), ("events", "event: error\n")):
        last = answers[name].text.rstrip("\n").split("\n\n")[-1]
        assert last.startswith(begin), (name, last)
        assert '"code":"unavailable"' in last
    said = [json.loads(line) for line in logs.splitlines()]
    assert [line["event"] for line in said] == ["listening", "draining", "stopped"], logs
    assert (said[1]["open_requests"], said[2]["ended_requests"]) == (6, 6)
    states = [await db.hget(key, "status") for key in await db.keys("hr:{smollm2}:job:*")]
    assert sorted(states) == [b"cancelled"] * 4 + [b"queued"]  # whoever watched the job can go on elsewhere


def test_without_redis_it_serves_and_says_so_once() -> None:
    port = free_port()
    variables = environment(redis_url=NO_REDIS, log_format="json", port=str(port))
    with subprocess.Popen(COMMAND, env=variables, stderr=subprocess.PIPE, text=True) as started:
        try:
            wait_until_up(port)
            for _ in range(3):
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5)
                time.sleep(1)
        finally:
            started.send_signal(signal.SIGTERM)
        assert started.stderr
        events = [json.loads(line)["event"] for line in started.stderr]
    assert events.count("redis_unreachable") == 1
    assert "redis" not in "".join(event for event in events if event != "redis_unreachable")

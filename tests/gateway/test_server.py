"""The gateway as a process: how it starts, refuses to start, and stops."""

from __future__ import annotations

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
    assert all(json.loads(line) for line in logs.splitlines())


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

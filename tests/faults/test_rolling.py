"""Deploys under load: workers and gateways replaced one after the other, and no request that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(110)]
TOKENS = 60


@pytest.fixture
def free_port(redis_server) -> Any:
    return sys.modules[type(redis_server).__module__].free_port


class Gateways:
    """Gateway processes by port, and where a balancer would send the next request."""

    def __init__(self, redis_url: str, free_port: Any) -> None:
        self._redis_url, self._free_port = redis_url, free_port
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> int:
        port = self._free_port()
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        command = [sys.executable, "-m", "gateway", "--redis-url", self._redis_url, "--port", str(port)]
        command += ["--log-level", "warning"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.running[port] = process
        return port

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def gateways(redis_url, free_port, tools) -> Iterator[Gateways]:
    gateways = Gateways(redis_url, free_port)
    yield gateways
    gateways.close()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


class Load(threading.Thread):
    """One client after another streams a completion and compares it with what must be said."""

    def __init__(self, gateways: Gateways, tools: Any, name: str, model: str) -> None:
        super().__init__(name=name, daemon=True)
        self._gateways, self._tools, self._model = gateways, tools, model
        self.stop = threading.Event()
        self.good = 0
        self.bad: list[str] = []
        self.gaps_s: list[float] = []

    def run(self) -> None:
        while not self.stop.is_set():
            prompt = f"{self.name} {self.good + len(self.bad)}"
            try:
                text = self._ask(prompt)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.bad.append(f"{type(error).__name__}: {error}")
                continue
            if text == self._tools.answer(prompt, TOKENS):
                self.good += 1
            else:
                self.bad.append(text)

    def _ask(self, prompt: str) -> str:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
        while True:
            port = list(self._gateways.running)[-1]
            try:
                return self._stream(f"http://127.0.0.1:{port}/v1/completions", body)
            except httpx.ConnectError:  # a balancer takes the next one
                time.sleep(0.02)

    def _stream(self, url: str, body: dict[str, Any]) -> str:
        text, last_s = "", None
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: ") or line.endswith("[DONE]"):
                    continue
                now_s = time.monotonic()
                if last_s is not None:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(chunk)
                text += "".join(choice["text"] for choice in chunk["choices"])
        return text


def test_rolling_restart_of_three_workers_and_two_gateways(pool, tools, gateways, redis_url):
    workers = [pool.start("--log-level", "warning", step_ms=10) for _ in range(3)]
    ports = [gateways.start() for _ in range(2)]
    for port in ports:
        tools.eventually(lambda port=port: is_ready(port))
    model = httpx.get(f"http://127.0.0.1:{ports[0]}/v1/models").json()["data"][0]["id"]
    load = [Load(gateways, tools, f"client {n}", model) for n in range(4)]
    for client in load:
        client.start()
    for worker in workers:
        pool.start("--log-level", "warning", step_ms=10)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(15) == 0
    for port in ports:
        fresh = gateways.start()
        tools.eventually(lambda fresh=fresh: is_ready(fresh))
        old = gateways.running.pop(port)
        old.send_signal(signal.SIGTERM)
        old.wait(20)
    for client in load:
        client.stop.set()
    for client in load:
        client.join(30)
    assert [bad for client in load for bad in client.bad] == []
    assert sum(client.good for client in load) > 12
    gaps = sorted(gap for client in load for gap in client.gaps_s)
    print(f"gaps: p50 {gaps[len(gaps) // 2]:.4f} p99 {gaps[len(gaps) * 99 // 100]:.4f} max {gaps[-1]:.4f} s")

"""One pool as a stranger's software sees it: a gateway and a worker as processes, with a simulated model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from headrace.config import default_cache_dir
from headrace.keys import Keys

NODE = Path(__file__).parent / "node"
START_S = 60.0
HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "smollm2", "messages": HELLO, "temperature": 0, "max_tokens": 24}


class Stack:
    """What the clients talk to."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.redis = redis.Redis.from_url(redis_url, socket_timeout=20)
        self.keys = Keys("smollm2")
        self.url = ""
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        self.spawn("worker", "--model", "simulated:step_ms=1")
        gateway = self.spawn("gateway", "--port", "0", "--log-format", "json", "--heartbeat-s", "2")
        assert gateway.stderr is not None
        said = ""
        for line in gateway.stderr:
            said += line
            if '"listening"' in line:
                self.url = json.loads(line)["url"]
                break
        assert self.url, said
        threading.Thread(target=gateway.stderr.read, daemon=True).start()
        self._wait_ready()

    def spawn(self, module: str, *flags: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        command = [sys.executable, "-m", module, "--redis-url", self.redis_url, *flags]
        err = subprocess.PIPE if module == "gateway" else subprocess.DEVNULL
        process = subprocess.Popen(command, env=env, stdout=err, stderr=subprocess.STDOUT, text=True)
        process.stderr = process.stdout
        self._processes.append(process)
        return process

    def _wait_ready(self) -> None:
        def ready() -> bool:
            pools = httpx.get(f"{self.url}/readyz", timeout=5).json()["pools"]
            return any(pool["workers"] for pool in pools.values())

        self.eventually(ready, START_S)

    def eventually(self, look: Callable[[], Any], timeout_s: float = 15.0) -> Any:
        end_s = time.monotonic() + timeout_s
        while not (value := look()):
            assert time.monotonic() < end_s, f"still {value!r} after {timeout_s} s"
            time.sleep(0.02)
        return value

    def idle(self) -> bool:
        """No job runs or waits, nobody follows one."""
        entries = sum(self.redis.xlen(self.keys.queue(c)) for c in ("high", "normal", "low"))
        return not entries and not self.redis.pubsub_channels(self.keys.live("*"))

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(20)
        self.redis.close()


@pytest.fixture(scope="session")
def stack(redis_servers: Callable[[str], Any]) -> Iterator[Stack]:
    """One for all clients, with a Redis of its own: other tests empty theirs."""
    shared = redis_servers("default")
    server = type(shared)(shared.binary)
    server.start()
    stack = Stack(server.url)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()
        server.close()


@pytest.fixture(scope="session")
def expected(stack: Stack) -> str:
    """The answer to `ASK`, as plain HTTP gives it."""
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=ASK, timeout=20)
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="session")
def node_project() -> Path:
    """The script that uses Vercel's packages, beside them; they are installed once for each set of them."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    wanted = (NODE / "package.json").read_bytes()
    project = Path(default_cache_dir()) / "node" / hashlib.sha256(wanted).hexdigest()[:16]
    if not (project / "node_modules").is_dir():
        _install(npm, project)
    shutil.copy(NODE / "ask.mjs", project)
    return project


def _install(npm: str, project: Path) -> None:
    """Elsewhere first: what was interrupted is never taken for complete."""
    project.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=project.parent) as started:
        shutil.copy(NODE / "package.json", started)
        command = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, cwd=started, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-2000:]
        project.mkdir(exist_ok=True)
        os.replace(Path(started) / "node_modules", project / "node_modules")
        shutil.copy(NODE / "package.json", project)


@pytest.fixture
def kit() -> Any:
    """This module's helpers, for tests that cannot import a conftest."""
    return sys.modules[__name__]

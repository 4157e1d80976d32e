"""A redis-server, workers and gateways as processes of their own, to be killed, frozen and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import redis

from headrace.keys import Keys

POOL = "chaos"
LEASE_MS = 1_000
START_S = 120.0
REDIS_OPTIONS = {
    "bind": "127.0.0.1",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "aof-load-truncated": "yes",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_module(log: Path, module: str, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    """`python -m module`, without this process's own settings, its output at the end of `log`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", module, *flags], env=env, stdout=out, stderr=out)


def stop_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to each, frozen ones too; SIGKILL to those that are still there after 15 s."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
    for process in processes:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Server:
    """A redis-server with an append-only file, to be killed and started again."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._binary, self._folder = binary, folder
        self._process: subprocess.Popen[bytes] | None = None

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def start(self) -> None:
        options = {**REDIS_OPTIONS, "port": str(self.port), "dir": str(self._folder)}
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        with (self._folder / "redis.out").open("ab") as out:
            self._process = subprocess.Popen([self._binary, *flags], stdout=out, stderr=out)
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            time.sleep(0.02)
        raise RuntimeError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cut(self, share: float) -> None:
        """Drops the tail of the append-only file, as a loss of power drops what was not synced."""
        files = [*self._folder.glob("appendonlydir/*.incr.aof"), *self._folder.glob("appendonly.aof")]
        newest = max(files, key=lambda path: path.stat().st_mtime)
        os.truncate(newest, int(newest.stat().st_size * (1 - share)))


class Fleet:
    """Worker processes, each started again when it is killed, under a new id."""

    def __init__(self, url: str, model: str, folder: Path, max_num_seqs: int) -> None:
        self._flags = ["--redis-url", url, "--pool", POOL, "--lease-ms", str(LEASE_MS), "--model", model]
        # Killing at random, a job alone may well be hit twice: no death is evidence here.
        self._flags += ["--max-num-seqs", str(max_num_seqs), "--log-format", "json", "--max-attempts", "1000"]
        self._folder = folder
        self._started = 0
        self.workers: list[subprocess.Popen[bytes]] = []
        self.died: list[int] = []

    def add(self) -> None:
        self._started += 1
        name = f"w{self._started}"
        flags = [*self._flags, "--worker-id", name]
        self.workers.append(start_module(self._folder / f"{name}.log", "worker", flags))

    def wait_ready(self, client: Any) -> None:
        """Raises RuntimeError if a worker ends instead."""
        while client.zcard(Keys(POOL).workers) < len(self.workers):
            if any(worker.poll() is not None for worker in self.workers):
                raise RuntimeError("a worker did not start: see its log (--keep)")
            time.sleep(0.05)

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        worker.kill()
        worker.wait()
        self.workers.remove(worker)
        self.add()

    def replace_dead(self) -> None:
        for worker in [w for w in self.workers if w.poll() is not None]:
            self.died.append(worker.returncode)
            self.workers.remove(worker)
            self.add()

    def stop(self) -> None:
        stop_all(self.workers)
        self.workers.clear()


class Gateways:
    """Gateway processes, each at a port that it keeps when it is killed and started again."""

    def __init__(self, redis_url: str, folder: Path, count: int) -> None:
        self._redis_url, self._folder = redis_url, folder
        self.ports = [free_port() for _ in range(count)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self) -> None:
        for port in self.ports:
            self._start(port)

    def _start(self, port: int) -> None:
        flags = ["--redis-url", self._redis_url, "--pool", POOL, "--port", str(port)]
        flags += ["--log-level", "warning", "--log-format", "json"]
        self._running[port] = start_module(self._folder / f"gateway-{port}.log", "gateway", flags)

    def wait_ready(self) -> None:
        """Raises RuntimeError if one does not serve in time."""
        end_s = time.monotonic() + START_S
        for url in self.urls:
            while not self._serves(url):
                if time.monotonic() > end_s:
                    raise RuntimeError("a gateway did not start: see its log (--keep)")
                time.sleep(0.05)

    def _serves(self, url: str) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
        return False

    def kill(self, port: int) -> None:
        process = self._running[port]
        process.kill()
        process.wait()
        self._start(port)

    def stop(self) -> None:
        stop_all(list(self._running.values()))
        self._running.clear()

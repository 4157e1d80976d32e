"""A Redis that comes back with much to load answers `LOADING`: all live on, say so once, and lose nothing."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(120)]

FILLERS = 12_000
DELAY_US = 300  # a command of the append-only file: about 4 s in all
TOKENS = 120


class Stream(threading.Thread):
    """One client's streamed completion, up to its end."""

    def __init__(self, url: str, prompt: str, model: str) -> None:
        super().__init__(daemon=True)
        fields = {"prompt": prompt, "model": model, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        self._request = completion(url, fields)
        self.text, self.chunks = "", 0
        self.job_id = ""
        self.complete = False

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as response:
            self.job_id = response.headers["x-headrace-jobs"]
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                self.complete |= data == "[DONE]"
                if data.startswith("{"):
                    self.text += "".join(choice["text"] for choice in json.loads(data)["choices"])
                    self.chunks += 1


def completion(url: str, fields: dict[str, Any]) -> urllib.request.Request:
    headers = {"content-type": "application/json"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode(), headers)


@pytest.fixture
def slow_start(redis_server, tools, tmp_path: Path):
    """From now on the server takes its time to load; it has little to load yet, whatever ran before."""
    with redis_server.client() as client:
        client.flushall()
        client.bgrewriteaof()
        tools.eventually(lambda: rewriting(client) == 0)
    wrapper = tmp_path / "slow-redis-server"
    wrapper.write_text(f'#!/bin/sh\nexec "{redis_server.binary}" --key-load-delay {DELAY_US} "$@"\n')
    wrapper.chmod(0o755)
    binary, redis_server.binary = redis_server.binary, str(wrapper)
    yield redis_server
    redis_server.binary = binary
    redis_server.kill()


def rewriting(client: redis.Redis) -> int:
    told = client.info("persistence")
    return told["aof_rewrite_in_progress"] + told["aof_rewrite_scheduled"]


def fill(client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipe:
        for n in range(FILLERS):
            pipe.set(f"filler:{n}", n, ex=600)
        pipe.execute()


def seconds_of_loading(pool, server) -> float:
    """Kills the server and starts it again; for how long it answered `LOADING`, as somebody else sees it."""
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    first_s = last_s = 0.0
    while starting.is_alive():
        try:
            pool.redis.ping()
        except redis.BusyLoadingError:
            last_s = time.monotonic()
            first_s = first_s or last_s
        except redis.ConnectionError:
            time.sleep(0.01)
    starting.join()
    return last_s - first_s


def count(said: str, event: str) -> int:
    return sum(json.loads(line)["event"] == event for line in said.splitlines())


def test_loading_for_longer_than_the_lease(pool, tools, services, slow_start):
    worker = pool.start("--log-format", "json", "--lease-ms", "1500", step_ms=15)
    url = services.gateway(pool.url)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    fill(pool.redis)
    streams = [Stream(url, f"load {n}", model) for n in range(3)]
    for stream in streams:
        stream.start()
    tools.eventually(lambda: all(stream.chunks >= 10 for stream in streams))
    tools.eventually(lambda: pool.redis.info("persistence")["aof_pending_bio_fsync"] == 0)
    assert seconds_of_loading(pool, slow_start) > 1.5
    for n, stream in enumerate(streams):
        stream.join(60)
        assert stream.complete
        assert stream.text == tools.answer(f"load {n}", TOKENS)
        state = pool.state(stream.job_id)
        assert state["attempt"] == "1"
        assert "history" not in state  # an outage is nobody's death
    again = pool.submit(prompt="afterwards", max_tokens=5, temperature=0)
    assert tools.text_of(pool.wait_end(again)) == tools.answer("afterwards", 5)
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=15)
    told = {event: count(said, event) for event in ("claim_failing", "claim_recovered", "redis_unreachable")}
    assert told == {"claim_failing": 1, "claim_recovered": 1, "redis_unreachable": 0}
    assert services.events("gateway").count("redis_unreachable") == 1
    assert services.events("gateway").count("redis_back") == 1


def test_requests_and_a_new_worker_meanwhile(pool, tools, services, slow_start):
    """A gateway refuses at once, with 503; a worker that starts waits, and says what for."""
    url = services.gateway(pool.url)
    pool.redis.sadd("hr:pools", "smollm2")
    fill(pool.redis)
    slow_start.kill()
    starting = threading.Thread(target=slow_start.start)
    starting.start()
    worker = pool.start("--log-format", "json", wait=False)
    tools.eventually(lambda: services.events("gateway").count("redis_unreachable") == 1)
    refused = 0
    while starting.is_alive():
        began_s = time.monotonic()
        try:
            urllib.request.urlopen(completion(url, {"prompt": "x", "model": "smollm2"}), timeout=10).close()
        except urllib.error.HTTPError as answer:
            refused += answer.code == 503 and time.monotonic() - began_s < 2
        time.sleep(0.05)
    assert refused
    job = pool.submit(prompt="first", max_tokens=5, temperature=0)
    assert tools.text_of(pool.wait_end(job)) == tools.answer("first", 5)
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=15)
    assert count(said, "redis_unreachable") == 1
    assert "loading" in next(line for line in said.splitlines() if "redis_unreachable" in line)

"""Whole worker processes over a real Redis, with the simulated model: every answer is known beforehand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from headrace.connect import connect_sync
from headrace.keys import Keys
from headrace.log import decode_entries
from headrace.messages import Delta, End, Event
from worker.simulated import Answer, make_codec

WAIT_S = 30.0
LEASE_MS = 600


def eventually(look: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Polls until `look()` is true and returns it; fails with the last value otherwise."""
    end_s = time.monotonic() + timeout_s
    while not (value := look()):
        if time.monotonic() > end_s:
            raise AssertionError(f"still {value!r} after {timeout_s} s")
        time.sleep(0.005)
    return value


class Pool:
    """A pool as a producer and an operator see it, and the worker processes that serve it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = connect_sync(url, timeout_s=20, tag="smollm2")
        self.keys = Keys("smollm2")
        self._workers: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, step_ms: float = 5, model: str = "", wait: bool = True) -> subprocess.Popen:
        worker_id = f"w{len(self._workers)}"
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        command = [sys.executable, "-m", "worker", "--redis-url", self.url, "--worker-id", worker_id]
        command += ["--model", model or f"simulated:step_ms={step_ms}", "--lease-ms", str(LEASE_MS), *flags]
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        self._workers.append(process)
        if wait:
            eventually(lambda: process.poll() is not None or self.redis.exists(self.keys.worker(worker_id)))
            assert process.poll() is None, process.stderr.read()
        return process

    def submit(self, job_class: str = "normal", **fields: object) -> str:
        return self.submit_raw(fields, job_class)

    def submit_raw(self, fields: Mapping[Any, Any], job_class: str = "normal") -> str:
        """XADD as it is, bytes and all. Returns the job's id."""
        entry = self.redis.xadd(self.keys.queue(job_class), dict(fields))
        return str(fields.get("id") or f"{job_class}-{entry.decode()}")

    def log(self, job_id: str) -> list[Event]:
        return decode_entries(self.redis.xrange(self.keys.log(job_id)))

    def state(self, job_id: str) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.redis.hgetall(self.keys.job(job_id)).items()}

    def wait_end(self, job_id: str, timeout_s: float = WAIT_S) -> list[Event]:
        """The whole log once it has its end: gapless, with exactly one terminal event, the last."""
        eventually(lambda: self.state(job_id).get("t_end"), timeout_s)
        events = self.log(job_id)
        assert [e.seq for e in events] == list(range(1, len(events) + 1))
        assert [isinstance(e, End) for e in events] == [False] * (len(events) - 1) + [True]
        return events

    def wait_tokens(self, job_id: str, count: int) -> None:
        eventually(lambda: len(self.log(job_id)) >= count)

    def drained(self) -> bool:
        """Nothing waits, nothing is pending, nothing is leased."""
        waiting = sum(self.redis.xlen(self.keys.queue(c)) for c in ("high", "normal", "low"))
        return waiting == 0 and not self.redis.zcard(self.keys.leases)

    def close(self) -> None:
        for process in self._workers:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate()
        self.redis.close()


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.i == choice)


def ids_of(events: list[Event], choice: int = 0) -> list[int]:
    return [i for e in events if isinstance(e, Delta) and e.i == choice for i in e.ids]


def answer(prompt: str, num_tokens: int, seed: int = 0, choice: int = 0) -> str:
    return Answer(make_codec().encode_prompt(prompt), seed, choice).text(num_tokens)


@pytest.fixture
def pool(redis_url: str) -> Iterator[Pool]:
    pool = Pool(redis_url)
    yield pool
    pool.close()

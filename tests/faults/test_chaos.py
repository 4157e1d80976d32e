"""`headrace chaos` as an operator runs it: against real workers, with a verdict that can be bad."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(110)]


@pytest.fixture
def chaos(pool, redis_server):
    def run(*flags: str, url: str = redis_server.url) -> tuple[int, dict[str, Any], str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        command = [str(Path(sys.executable).with_name("headrace")), "chaos", "--redis-url", url, *flags]
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
        return found.returncode, json.loads(found.stdout or "{}"), found.stderr

    return run


@pytest.fixture
def marked(pool) -> None:
    pool.redis.set("hr:chaos", "allowed")


def redis_cli(redis_server, *words: str) -> str:
    return " ".join([shutil.which("redis-cli") or "redis-cli", "-p", str(redis_server.port), *words])


SHORT = ["--jobs", "7", "--tokens", "40", "--at-once", "7", "--pause-s", "0.15", "--seconds", "2"]
FIRST_EXEC = ["--seed", "0"]  # draws a command of ours before anything else
MANY = ["--max-attempts", "100", "--log-level", "warning"]


def test_good_jobs_under_every_kind_of_fault(pool, chaos, marked, redis_server):
    doomed = pool.start(*MANY, step_ms=10)
    pool.start(*MANY, step_ms=10)
    status, figures, said = chaos(*SHORT, "--exec", f"kill -KILL {doomed.pid}", *FIRST_EXEC)
    assert (status, figures["bad_jobs"]) == (0, 0), (figures, said)
    assert figures["jobs"] % 7 == 0
    assert figures["tokens"] > figures["jobs"] * 20
    assert figures["gap_p50_ms"] <= figures["gap_p99_ms"] <= figures["gap_max_ms"]
    assert sum(figures["disturbances"].values()) >= 2
    assert doomed.poll() is not None


def test_lost_jobs_are_bad_ones(pool, chaos, marked, redis_server):
    pool.start(*MANY, step_ms=20)
    status, figures, said = chaos(*SHORT, "--exec", redis_cli(redis_server, "FLUSHALL"), *FIRST_EXEC)
    assert figures["disturbances"]["exec"] >= 1
    assert status == 1
    assert figures["bad_jobs"] >= 1
    assert "told lost" in said


def test_it_refuses_what_is_not_meant_for_it(pool, chaos):
    status, _, said = chaos()
    assert status == 1
    assert "SET hr:chaos allowed" in said
    pool.redis.set("hr:chaos", "allowed")
    status, _, said = chaos()
    assert status == 1
    assert "no worker" in said


def test_the_proof_itself_in_small():
    """`make chaos` with everything it has, once each; every third job is heard over HTTP."""
    small = {"jobs": 9, "tokens": 40, "workers": 2, "kills": 1, "freezes": 0, "storms": 1, "pause-s": 0.2}
    flags = [f"--{name}={value}" for name, value in {**small, "redis-kills": 1, "gateway-kills": 1}.items()]
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.chaos", *flags]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stdout + found.stderr
    figures = json.loads(found.stdout)
    assert (figures["jobs"] % 9, figures["bad_jobs"], figures["dead"]) == (0, 0, 0)
    assert [figures[f"{what}_kills"] for what in ("redis", "gateway")] == [1, 1]

"""A worker that is told to leave gives its jobs to the others at once, whatever it is doing just then."""

from __future__ import annotations

import signal
import sys
import time
from itertools import pairwise

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.e2e]
LONG_LEASE = ("--lease-ms", "30000")  # whoever waits for a lease to end fails by time
STEP_S = 0.2


@pytest.fixture
def tools(request: pytest.FixtureRequest):
    """The helpers of this folder's conftest, which importlib mode does not let us import."""
    return sys.modules[type(request.getfixturevalue("pool")).__module__]


def wait_line(worker, event: str) -> None:
    """Reads the worker's log up to the line that holds `event`."""
    for line in worker.stderr:
        if event in line:
            return
    raise AssertionError(f"{event} was never said")


@pytest.mark.alone
def test_the_next_token_comes_within_two_steps_of_the_last(pool, tools):
    first = pool.start(*LONG_LEASE, step_ms=STEP_S * 1000)
    job = pool.submit(prompt="over", max_tokens=4000, temperature=0)
    pool.wait_tokens(job, 3)
    pool.start(*LONG_LEASE, step_ms=STEP_S * 1000)
    neighbour = pool.submit(prompt="another worker's", max_tokens=4000, temperature=0)
    pool.wait_tokens(neighbour, 2)
    said, arrivals = len(pool.log(job)), [time.monotonic()]
    first.send_signal(signal.SIGTERM)
    while len(arrivals) < 5:
        tools.eventually(lambda said=said: len(pool.log(job)) > said)
        said = len(pool.log(job))
        arrivals.append(time.monotonic())
    gaps_s = [after - before for before, after in pairwise(arrivals)]
    assert max(gaps_s) < 3 * STEP_S, gaps_s  # two steps, and the prefill, which is one step of this model
    pool.redis.hset(pool.keys.job(job), "cancel", 1)
    said = tools.text_of(pool.wait_end(job))
    assert tools.answer("over", 4000).startswith(said.rstrip("\ufffd"))
    assert (pool.state(job)["attempt"], pool.state(job)["worker"]) == ("1", "w1")
    assert first.wait(10) == 0


def test_a_claim_under_way_is_given_back(pool, tools):
    """A long prompt is tokenised between its claim and its first step."""
    first = pool.start(*LONG_LEASE)
    jobs = [pool.submit(prompt=str(n) + "x" * 300_000, max_tokens=5) for n in range(8)]  # one after another
    tools.eventually(lambda: pool.state(jobs[0]).get("status"))
    first.send_signal(signal.SIGTERM)
    assert first.wait(10) == 0
    assert not pool.redis.zcard(pool.keys.leases)
    states = [pool.state(job) for job in jobs]
    left = [state for state in states if state.get("status") != "failed"]
    assert left
    assert {(state.get("status", "queued"), state.get("attempt", "0")) for state in left} == {("queued", "0")}
    pool.start(*LONG_LEASE)
    for job in jobs:
        assert pool.wait_end(job)[-1].error["code"] == "context_length_exceeded"
        assert "history" not in pool.state(job)


def test_a_second_sigterm_leaves_at_once(pool, tools):
    stuck = pool.start("--stall-timeout-s", "0", model="simulated:hang_on=HANG")
    job = pool.submit(prompt="HANG", max_tokens=5, temperature=0)
    tools.eventually(lambda: pool.state(job).get("status") == "running")
    stuck.send_signal(signal.SIGTERM)
    wait_line(stuck, "worker_drains")
    assert stuck.poll() is None  # its step never ends, and it has time
    stuck.send_signal(signal.SIGTERM)
    assert stuck.wait(2) == 130
    pool.start()
    assert tools.text_of(pool.wait_end(job)) == tools.answer("HANG", 5)

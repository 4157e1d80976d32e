"""A prompt that ends its worker is found by elimination; those that ran beside it get through unharmed."""

from __future__ import annotations

import json
import signal

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(90)]


def test_the_culprit_is_found_and_the_innocent_get_through(pool, tools, keep):
    innocent = {pool.submit(prompt=f"good {n}", max_tokens=90, temperature=0): n for n in range(7)}
    culprit = pool.submit(prompt="this is a BOMB", max_tokens=90, temperature=0)
    keeper = keep(2, model="simulated:step_ms=15,crash_on=BOMB")
    events = pool.wait_end(culprit, 60)
    assert (events[-1].status, events[-1].error["code"]) == ("failed", "poison")
    for job, n in innocent.items():
        assert tools.text_of(pool.wait_end(job)) == tools.answer(f"good {n}", 90)
    ((_, copy),) = pool.redis.xrange(pool.keys.dead)
    history = json.loads(copy[b"history"])
    assert copy[b"job"].decode() == culprit
    together = [death["together"] for death in history]
    assert together == sorted(together, reverse=True)
    assert together.count(1) == 2
    assert len(keeper.deaths) <= 6  # 8, 4, 2, 1, 1 ran together, if all were there at first
    tools.eventually(pool.drained)


def test_a_frozen_worker_is_no_death(pool, tools):
    frozen = pool.start(step_ms=20)
    job = pool.submit(prompt="thaw", max_tokens=200, temperature=0)
    pool.wait_tokens(job, 5)
    pool.start(step_ms=20)
    for worker, other in ((frozen, "w1"), (pool._workers[1], "w0")):
        worker.send_signal(signal.SIGSTOP)
        tools.eventually(lambda other=other: pool.state(job).get("worker") == other)
        worker.send_signal(signal.SIGCONT)
        tools.eventually(lambda: pool.state(job).get("history") == "[]")
    assert tools.text_of(pool.wait_end(job)) == tools.answer("thaw", 200)

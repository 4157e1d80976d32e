"""What broke other queues: idle workers, restarts, kills at the worst moment, hoarders."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.connect import connect
from headrace.scripts import Scripts

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(110)]
QUIET = ("--log-level", "warning", "--log-format", "json")
LEASE_S = 0.6
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def calls(pool: Any) -> int:
    """Commands that clients sent; those within scripts are not counted."""
    stats = pool.redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "xread"))


def cut_connections(pool: Any) -> None:
    for kind in ("normal", "pubsub"):
        pool.redis.client_kill_filter(_type=kind, skipme=True)


def ask(pool: Any, tools: Any, prompt: str, num_tokens: int = 5, within_s: float = 10) -> str:
    """Runs one greedy job to its end; its id."""
    job = pool.submit(prompt=prompt, max_tokens=num_tokens, temperature=0)
    assert tools.text_of(pool.wait_end(job, within_s)) == tools.answer(prompt, num_tokens)
    return str(job)


def test_each_worker_consumes_again_after_outages(pool, tools, redis_server, again_and_again):
    workers = [pool.start(*QUIET) for _ in range(2)]
    load = [pool.submit(prompt=f"load {n}", max_tokens=60, temperature=0) for n in range(4)]
    for _ in range(2):
        redis_server.restart()
        time.sleep(0.3)
    redis_server.pause()
    time.sleep(1.0)
    redis_server.resume()
    with again_and_again(lambda: cut_connections(pool), 0.05):
        time.sleep(0.5)
    for n, job in enumerate(load):
        assert tools.text_of(pool.wait_end(job)) == tools.answer(f"load {n}", 60)
    for n, frozen in enumerate(workers):
        frozen.send_signal(signal.SIGSTOP)
        job = ask(pool, tools, f"pinned {n}")
        assert pool.state(job)["worker"] == f"w{1 - n}"
        frozen.send_signal(signal.SIGCONT)
    assert [worker.poll() for worker in workers] == [None, None]


def test_an_idle_worker_costs_little_stays_connected_and_answers_at_once(pool, tools):
    worker = pool.start(*QUIET)
    ask(pool, tools, "warm")
    before, cpu, connected = calls(pool), cpu_s(worker.pid), pool.redis.info("stats")
    seconds = 3.0
    time.sleep(seconds)
    stats = pool.redis.info("stats")
    commands = stats["total_commands_processed"] - connected["total_commands_processed"]
    assert commands / seconds < 200  # also those within scripts
    assert (calls(pool) - before) / seconds < 50
    assert (cpu_s(worker.pid) - cpu) / seconds < 0.1
    assert stats["total_connections_received"] == connected["total_connections_received"]
    started_s = time.monotonic()
    ask(pool, tools, "awake", 1)
    assert time.monotonic() - started_s < 1.0


def test_a_busy_worker_polls_no_more_than_each_5_ms(pool, tools):
    pool.start(*QUIET, step_ms=1)
    job = pool.submit(prompt="busy", max_tokens=8000, temperature=0)
    pool.wait_tokens(job, 50)
    before, said, started_s = calls(pool), len(pool.log(job)), time.monotonic()
    time.sleep(1.5)
    polls = calls(pool) - before - (len(pool.log(job)) - said)  # each step is one call of `emit`
    assert polls / (time.monotonic() - started_s) < 250
    pool.redis.hset(pool.keys.job(job), "cancel", 1)


def test_a_lost_consumer_group_makes_no_noise_and_no_load(pool, tools):
    worker = pool.start(*QUIET)
    ask(pool, tools, "before")
    pool.redis.flushall()
    cpu = cpu_s(worker.pid)
    time.sleep(2.0)
    assert (cpu_s(worker.pid) - cpu) / 2.0 < 0.2
    ask(pool, tools, "after")
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=10)
    assert len(said.splitlines()) < 10, said


def test_twenty_workers_that_came_and_went_leave_no_consumers(pool, tools):
    ask_one = {"prompt": "x", "max_tokens": 1}
    queue, keys = pool.keys.queue("normal"), pool.keys
    pool.start(*QUIET)
    pool.wait_end(pool.submit(**ask_one))
    for n in range(20):
        pool.redis.xgroup_createconsumer(queue, "workers", f"gone-{n}")
        pool.redis.zadd(keys.workers, {f"gone-{n}": 1})  # its card expired
    assert len(pool.redis.xinfo_consumers(queue, "workers")) >= 21
    reaped = run_scripts(pool, lambda scripts: scripts.reap(consumer_idle_ms=0))
    assert reaped.consumers == 20
    names = {consumer["name"] for consumer in pool.redis.xinfo_consumers(queue, "workers")}
    assert names <= {b"ready", b"w0"}
    pool.wait_end(pool.submit(**ask_one))
    assert pool.redis.xlen(queue) == 0


def run_scripts(pool: Any, work: Callable[[Any], Any]) -> Any:
    async def run() -> Any:
        client = connect(pool.url)
        try:
            return await work(Scripts(client, pool.keys))
        finally:
            await client.aclose()

    return asyncio.run(run())


def test_steps_longer_than_the_lease_start_no_second_run(pool, tools):
    for _ in range(2):
        pool.start(*QUIET, step_ms=2 * LEASE_S * 1000)
    job = ask(pool, tools, "slow", 2)
    assert pool.state(job)["attempt"] == "1"


def test_connections_cut_200_times_a_second_hide_no_job(pool, tools, again_and_again):
    pool.start(*QUIET)
    jobs = [pool.submit(prompt=f"ghost {n}", max_tokens=5, temperature=0) for n in range(60)]
    with again_and_again(lambda: cut_connections(pool), 0.005):
        time.sleep(1.5)
    for n, job in enumerate(jobs):
        assert tools.text_of(pool.wait_end(job, 15)) == tools.answer(f"ghost {n}", 5)
    tools.eventually(pool.drained)


def test_an_id_used_again_after_its_time_says_nothing_old(pool, tools):
    pool.start(*QUIET, "--retention-ms", "300")
    pool.submit(id="again", prompt="first", max_tokens=30, temperature=0)
    pool.wait_end("again")
    tools.eventually(lambda: not pool.redis.exists(pool.keys.job("again"), pool.keys.log("again")))
    pool.submit(id="again", prompt="second", max_tokens=20, temperature=0)
    assert tools.text_of(pool.wait_end("again")) == tools.answer("second", 20)


def test_a_worker_holds_what_it_runs_and_no_more(pool, tools, again_and_again):
    pool.start(*QUIET, "--max-num-seqs", "4", step_ms=20)
    jobs = [pool.submit(prompt=f"long {n}", max_tokens=4000) for n in range(12)]
    tools.eventually(lambda: pool.redis.zcard(pool.keys.leases) == 4)
    with again_and_again(lambda: pool.submit(prompt="one more", max_tokens=4000), 0.01):
        assert {pool.redis.zcard(pool.keys.leases) for _ in range(500)} == {4}
    pool.start(*QUIET, "--max-num-seqs", "4", step_ms=20)
    tools.eventually(lambda: pool.redis.zcard(pool.keys.leases) == 8, 2)
    holders = [pool.state(job).get("worker") for job in jobs]
    assert (holders.count("w0"), holders.count("w1")) == (4, 4)


def test_a_death_fails_no_job_that_comes_later(pool, tools):
    workers = [pool.start(*QUIET) for _ in range(3)]
    jobs = []
    for n in range(90):
        jobs.append(pool.submit(prompt=f"stream {n}", max_tokens=8, temperature=0))
        if n == 30:
            workers[0].kill()
        time.sleep(0.01)
    for n, job in enumerate(jobs):
        assert tools.text_of(pool.wait_end(job, 15)) == tools.answer(f"stream {n}", 8)


def test_an_end_counts_once_whatever_is_cut_around_it(pool, tools):
    pool.start(*QUIET, step_ms=2)
    rng = random.Random(7)
    jobs: list[str] = []
    while len(jobs) < 20:
        for _ in range(4):  # they end in the same steps
            fields = {"prompt": f"end {len(jobs)}", "webhook": "http://127.0.0.1:9/"}
            jobs.append(pool.submit(**fields, max_tokens=4, temperature=0))
        pool.wait_tokens(jobs[-1], rng.choice((1, 3, 4)))
        cut_connections(pool)
    ends = {job: pool.wait_end(job, 15) for job in jobs}
    for n, (job, events) in enumerate(ends.items()):
        assert tools.text_of(events) == tools.answer(f"end {n}", 4)
        assert (pool.state(job)["status"], events[-1].usage.completion_tokens) == ("done", 4)
    tools.eventually(pool.drained)
    assert [pool.log(job) for job in jobs] == list(ends.values())
    told = [fields[b"job"].decode() for _, fields in pool.redis.xrange(pool.keys.hooks)]
    assert sorted(told) == sorted(jobs)


def test_workers_killed_at_random_leave_no_lock_and_no_count_behind(pool, tools, keep):
    keeper = keep(2, model="simulated:step_ms=15")
    jobs = [
        pool.submit(prompt=f"lock {n}", max_tokens=90, temperature=0, tenant=f"t{n % 3}") for n in range(9)
    ]
    rng = random.Random(3)
    for _ in range(4):
        time.sleep(0.3)
        alive = [worker for worker in keeper._running if worker.poll() is None]
        if alive:
            rng.choice(alive).kill()
    pool.start("--max-attempts", "100", *QUIET)
    for n, job in enumerate(jobs):
        events = pool.wait_end(job)
        if events[-1].status == "done":
            assert tools.text_of(events) == tools.answer(f"lock {n}", 90)
        else:
            assert events[-1].error["code"] == "poison"  # twice hit alone
    tools.eventually(pool.drained)
    tools.eventually(lambda: float(pool.redis.hget(pool.keys.vtime, "b:normal") or 0) == 0, 5)
    ask(pool, tools, "afterwards")


def test_a_mass_of_cancels_hits_nobody_else(pool, tools):
    pool.start(*QUIET, "--max-num-seqs", "48", step_ms=20)
    survivors = [pool.submit(prompt=f"survivor {n}", max_tokens=60, temperature=0) for n in range(4)]
    doomed = [pool.submit(prompt=f"doomed {n}", max_tokens=4000, temperature=0) for n in range(200)]
    tools.eventually(lambda: pool.redis.zcard(pool.keys.leases) == 48)
    with pool.redis.pipeline(transaction=False) as pipe:
        for job in doomed:
            pipe.hset(pool.keys.job(job), "cancel", 1)
            pipe.publish(pool.keys.ctl, f"cancel {job}")
        pipe.execute()
    for job in doomed:
        assert pool.wait_end(job, 10)[-1].status == "cancelled"
    for n, job in enumerate(survivors):
        assert tools.text_of(pool.wait_end(job, 10)) == tools.answer(f"survivor {n}", 60)
    tools.eventually(pool.drained)


def test_one_conversation_asked_ten_times_at_once(pool, tools):
    pool.start(*QUIET, step_ms=5)
    same = {"prompt": "the same words", "max_tokens": 40, "temperature": 0.9}
    jobs = {pool.submit(**same, seed=seed): seed for seed in range(10)}
    for job, seed in jobs.items():
        assert tools.text_of(pool.wait_end(job)) == tools.answer("the same words", 40, seed)


def test_poison_with_an_unusable_dead_letter_stream(pool, tools, keep):
    pool.redis.set(pool.keys.dead, "of somebody else")
    keep(1, model="simulated:step_ms=5,crash_on=BOMB")
    culprit = pool.submit(prompt="BOMB", max_tokens=5, temperature=0)
    assert pool.wait_end(culprit)[-1].error["code"] == "poison"
    ask(pool, tools, "innocent")
    assert pool.redis.get(pool.keys.dead) == b"of somebody else"

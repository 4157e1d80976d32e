"""Redis in trouble: the worker lives, says so in a line or two, recovers alone, and reports what was lost."""

from __future__ import annotations

import signal
import time

import pytest
import redis

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(90)]

RUNNING = {"prompt": "under way", "max_tokens": 80, "temperature": 0}
MAX_LINES = 14


# What depends on the server's version: texts of errors inside scripts, streams, the append-only file.
every_kind = pytest.mark.parametrize("redis_server", ["default", "bundled", "valkey"], indirect=True)


@pytest.fixture
def redis_server(request, redis_servers):
    return redis_servers(getattr(request, "param", "default"))


@pytest.fixture
def worker(pool):
    return pool.start("--log-format", "json", "--log-level", "warning", step_ms=15)


@pytest.fixture
def running(pool, worker) -> str:
    job = pool.submit(**RUNNING)
    pool.wait_tokens(job, 5)
    return job


def assert_lives(pool, tools, worker) -> None:
    """The same process serves a new job, and has not filled anybody's disk meanwhile."""
    assert worker.poll() is None
    again = pool.submit(prompt="afterwards", max_tokens=5, temperature=0)
    assert tools.text_of(pool.wait_end(again, 15)) == tools.answer("afterwards", 5)
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=15)
    assert len(said.splitlines()) <= MAX_LINES, said


def assert_undisturbed(pool, tools, job: str) -> None:
    assert tools.text_of(pool.wait_end(job)) == tools.answer(RUNNING["prompt"], RUNNING["max_tokens"])


def end_of(pool, job: str) -> tuple[str, str | None]:
    """Status and error code, wherever the end stands: behind a loss the log may have a gap."""
    events = pool.log(job)
    ends = [event for event in events if type(event).__name__ == "End"]
    assert len(ends) <= 1
    assert not ends or events[-1] is ends[0]
    return (ends[0].status, (ends[0].error or {}).get("code")) if ends else ("", None)


def test_freeze_for_longer_than_the_lease(pool, tools, worker, running, redis_server):
    redis_server.pause()
    time.sleep(2.5)
    redis_server.resume()
    assert_undisturbed(pool, tools, running)
    assert_lives(pool, tools, worker)


def test_storm_of_killed_connections(pool, tools, worker, running, again_and_again):
    def kill_all() -> None:
        pool.redis.client_kill_filter(_type="normal", skipme=True)
        pool.redis.client_kill_filter(_type="pubsub", skipme=True)

    with again_and_again(kill_all, 0.02):
        time.sleep(1.5)
    assert_undisturbed(pool, tools, running)
    assert worker.poll() is None


def test_scripts_flushed_ten_times_a_second(pool, tools, worker, running, again_and_again):
    with again_and_again(pool.redis.script_flush, 0.1):
        assert_undisturbed(pool, tools, running)
        assert_lives(pool, tools, worker)


def test_flushall_while_idle(pool, tools, worker):
    pool.wait_end(pool.submit(prompt="first", max_tokens=2))
    pool.redis.flushall()
    assert_lives(pool, tools, worker)


@every_kind
def test_flushall_mid_stream_reports_the_loss(pool, tools, worker, running):
    pool.redis.flushall()
    tools.eventually(lambda: end_of(pool, running) == ("failed", "lost"), 10)
    assert_lives(pool, tools, worker)


@every_kind
@pytest.mark.parametrize("fault", ["memory", "read-only"])
def test_writes_refused_for_a_while(pool, tools, worker, running, fault):
    if fault == "memory":
        pool.redis.config_set("maxmemory", "1mb")
    else:
        pool.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    time.sleep(1.5)
    if fault == "memory":
        pool.redis.config_set("maxmemory", "0")
    else:
        pool.redis.execute_command("REPLICAOF", "NO", "ONE")
    assert_undisturbed(pool, tools, running)
    assert_lives(pool, tools, worker)


FIXED = ["vtime", "leases", "deadlines", "ids", "suspects", "hooks", "dead", "undecodable", "workers"]


def test_wrong_type_on_each_key_of_the_pool(pool, tools, worker):
    for name in [*FIXED, "q:high", "ready:high"]:
        running = pool.submit(**RUNNING | {"max_tokens": 25})
        pool.wait_tokens(running, 2)
        key = f"hr:{{smollm2}}:{name}"
        pool.redis.set(key, "of somebody else")
        if name != "leases":  # without leases nobody can take a job
            other = pool.submit(prompt="meanwhile", max_tokens=4, temperature=0)
            assert tools.text_of(pool.wait_end(other, 10)) == tools.answer("meanwhile", 4), name
        else:
            time.sleep(1.0)
        pool.redis.delete(key)
        assert tools.text_of(pool.wait_end(running, 15)) == tools.answer(RUNNING["prompt"], 25), name
    assert_lives(pool, tools, worker)


@pytest.mark.parametrize("part", ["job", "log"])
def test_wrong_type_on_a_key_of_the_job(pool, tools, worker, running, part):
    key = getattr(pool.keys, part)(running)
    pool.redis.set(key, "of somebody else")
    time.sleep(0.5)
    pool.redis.delete(key)
    if part == "log":
        tools.eventually(lambda: pool.state(running).get("status") == "failed", 15)
    assert_lives(pool, tools, worker)


GONE = [(fault, "default") for fault in ("trim", "delete entry", "delete queue")]
GONE += [("delete entry", "bundled"), ("delete entry", "valkey")]


@pytest.mark.parametrize(("fault", "redis_server"), GONE, indirect=["redis_server"])
def test_entries_gone_under_running_and_waiting_jobs(pool, tools, fault):
    worker = pool.start("--max-num-seqs", "1", "--log-level", "warning", step_ms=15)
    running = pool.submit(**RUNNING)
    pool.wait_tokens(running, 5)
    waiting = pool.submit(prompt="waits", max_tokens=3)
    queue = pool.keys.queue("normal")
    tools.eventually(lambda: pool.redis.zcard(pool.keys.ready("normal")) == 1)
    if fault == "trim":
        pool.redis.xtrim(queue, 0, approximate=False)
    elif fault == "delete entry":
        pool.redis.xdel(queue, running.removeprefix("normal-"), waiting.removeprefix("normal-"))
    else:
        pool.redis.delete(queue)
    assert_undisturbed(pool, tools, running)
    tools.eventually(lambda: end_of(pool, waiting) == ("failed", "lost"), 15)
    assert_lives(pool, tools, worker)


@pytest.mark.parametrize("fault", ["trim", "delete events", "delete"])
def test_log_damaged_under_a_running_job(pool, tools, worker, running, fault):
    log = pool.keys.log(running)
    if fault == "trim":
        pool.redis.xtrim(log, 1, approximate=False)
    elif fault == "delete events":
        pool.redis.xdel(log, "2-0")
    else:
        pool.redis.delete(log)
    tools.eventually(lambda: end_of(pool, running) == ("failed", "lost"), 10)
    assert_lives(pool, tools, worker)


@every_kind
def test_the_largest_stream_id(pool, tools, worker, running):
    most = 2**64 - 1
    job = pool.submit_raw({"prompt": "last", "max_tokens": 3, "temperature": 0, "id": "last"})
    pool.wait_end(job)
    pool.redis.xadd(
        pool.keys.queue("normal"), {"prompt": "end", "id": "end", "max_tokens": 3}, id=f"{most}-{most}"
    )
    pool.wait_end("end", 15)
    assert_undisturbed(pool, tools, running)
    assert_lives(pool, tools, worker)


@every_kind
def test_a_truncated_append_only_file(pool, tools, worker, redis_server):
    """What a loss of power does: the last second of acknowledged writes is gone."""
    pool.wait_end(pool.submit(prompt="kept", max_tokens=3))
    jobs = [pool.submit(**RUNNING) for _ in range(3)]
    pool.wait_tokens(jobs[2], 30)
    redis_server.kill()
    files = [*redis_server.folder.glob("appendonlydir/*.incr.aof"), *redis_server.folder.glob("*.aof")]
    newest = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_mtime)
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    redis_server.start()
    for job in jobs:
        seen = tools.eventually(
            lambda job=job: end_of(pool, job)[0] or not pool.redis.exists(pool.keys.job(job)), 20
        )
        if seen == "done":
            assert_undisturbed(pool, tools, job)
        else:
            assert seen is True or end_of(pool, job) == ("failed", "lost")
    assert_lives(pool, tools, worker)


def test_away_for_longer_than_the_lease(pool, tools, worker, running, redis_server):
    redis_server.kill()
    time.sleep(1.5)
    redis_server.start()
    assert_undisturbed(pool, tools, running)
    with pytest.raises(redis.ResponseError):
        pool.redis.execute_command("NO SUCH COMMAND")  # it is a real server
    assert_lives(pool, tools, worker)

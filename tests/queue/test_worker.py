"""A worker process over a real Redis: what producers see, in good days and bad."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from headrace.messages import Delta, End, Finish

pytestmark = [pytest.mark.redis, pytest.mark.e2e]


@pytest.fixture
def tools(request: pytest.FixtureRequest):
    """The helpers of this folder's conftest, which importlib mode does not let us import."""
    return sys.modules[type(request.getfixturevalue("pool")).__module__]


def test_plain_xadd_is_answered_with_the_expected_text(pool, tools):
    pool.start()
    job = pool.submit(prompt="Hello", max_tokens=60, temperature=0)
    events = pool.wait_end(job)
    assert tools.text_of(events) == tools.answer("Hello", 60)
    state = pool.state(job)
    result, usage = json.loads(state["result"]), json.loads(state["usage"])
    assert result["choices"][0]["text"] == tools.text_of(events)
    assert usage == {"prompt_tokens": 5, "completion_tokens": 60, "total_tokens": 65, "cached_tokens": 0}
    tools.eventually(pool.drained)


def test_jobs_sent_before_any_worker_lives_run_when_one_comes(pool, tools):
    jobs = [pool.submit(prompt=f"p{n}", max_tokens=5, temperature=0) for n in range(5)]
    pool.start()
    for n, job in enumerate(jobs):
        assert tools.text_of(pool.wait_end(job)) == tools.answer(f"p{n}", 5)


@pytest.mark.alone
def test_a_job_joins_the_running_batch_within_two_steps(pool, tools):
    pool.start(step_ms=50)
    long = pool.submit(prompt="long", max_tokens=60, temperature=0)
    pool.wait_tokens(long, 5)
    before = len(pool.log(long))
    late = pool.submit(prompt="late", max_tokens=3, temperature=0)
    pool.wait_tokens(late, 1)
    assert len(pool.log(long)) - before <= 3  # steps of the neighbour; one may be under way at each end
    pool.wait_end(late)
    assert "t_end" not in pool.state(long)


@pytest.mark.parametrize("after", [1, 7, 23, 40])
def test_sigkill_mid_sentence_changes_no_byte(pool, tools, after):
    fields = {"max_tokens": 60, "temperature": 0.9, "seed": 11, "n": 2, "logprobs": 0}
    pool.start()
    undisturbed = pool.wait_end(pool.submit(id="calm", prompt="same", **fields))
    pool._workers[0].send_signal(signal.SIGTERM)
    pool._workers[0].wait(10)
    first = pool.start(step_ms=15)
    job = pool.submit(id="hit", prompt="same", **fields)
    pool.wait_tokens(job, after)
    first.kill()
    pool.start()
    events = pool.wait_end(job)
    assert int(pool.state(job)["attempt"]) == 2
    assert [e for e in events if isinstance(e, Delta)] == [e for e in undisturbed if isinstance(e, Delta)]
    assert events == undisturbed


def test_a_frozen_worker_is_fenced_and_goes_on_serving(pool, tools):
    frozen = pool.start(step_ms=20)
    job = pool.submit(prompt="thaw", max_tokens=60, temperature=0)
    pool.wait_tokens(job, 10)
    frozen.send_signal(signal.SIGSTOP)
    pool.start(step_ms=20)
    tools.eventually(lambda: pool.state(job).get("worker") == "w1")
    frozen.send_signal(signal.SIGCONT)
    events = pool.wait_end(job)
    assert tools.text_of(events) == tools.answer("thaw", 60)
    pool._workers[1].send_signal(signal.SIGTERM)
    pool._workers[1].wait(10)
    again = pool.submit(prompt="again", max_tokens=5, temperature=0)
    assert tools.text_of(pool.wait_end(again)) == tools.answer("again", 5)
    assert frozen.poll() is None


def test_sigterm_hands_over_without_using_an_attempt(pool, tools):
    first = pool.start(step_ms=20)
    job = pool.submit(prompt="over", max_tokens=60, temperature=0)
    pool.wait_tokens(job, 10)
    pool.start(step_ms=20)
    first.send_signal(signal.SIGTERM)
    assert first.wait(10) == 0
    events = pool.wait_end(job)
    assert tools.text_of(events) == tools.answer("over", 60)
    assert pool.state(job)["attempt"] == "1"


def test_a_job_displaced_by_a_higher_class_goes_on_where_there_is_room(pool, tools):
    pool.start("--max-num-seqs", "1", step_ms=10)
    low = pool.submit("low", prompt="low", max_tokens=60, temperature=0)
    pool.wait_tokens(low, 5)
    high = pool.submit("high", prompt="high", max_tokens=3000, temperature=0)
    pool.wait_tokens(high, 5)
    pool.start("--max-num-seqs", "1", step_ms=10)
    assert tools.text_of(pool.wait_end(low)) == tools.answer("low", 60)
    assert pool.state(high)["status"] == "running"
    state = pool.state(low)
    assert (state["attempt"], state["epoch"], state["worker"]) == ("1", "2", "w1")
    pool.redis.hset(pool.keys.job(high), "cancel", 1)


def test_sigterm_with_nobody_else_leaves_the_job_for_the_next(pool, tools):
    first = pool.start(step_ms=20)
    job = pool.submit(prompt="alone", max_tokens=40, temperature=0)
    pool.wait_tokens(job, 5)
    first.send_signal(signal.SIGTERM)
    assert first.wait(10) == 0
    assert pool.state(job)["status"] == "queued"
    pool.start()
    assert tools.text_of(pool.wait_end(job)) == tools.answer("alone", 40)


@pytest.mark.parametrize("hint", [True, False])
def test_cancel_while_running(pool, tools, hint):
    pool.start(step_ms=20)
    neighbour = pool.submit(prompt="neighbour", max_tokens=60, temperature=0)
    job = pool.submit(prompt="stop me", max_tokens=4000, temperature=0)
    pool.wait_tokens(job, 5)
    pool.redis.hset(pool.keys.job(job), "cancel", 1)
    if hint:
        pool.redis.publish(pool.keys.ctl, f"cancel {job}")
    events = pool.wait_end(job)
    assert events[-1].status == "cancelled"
    assert events[-1].usage.completion_tokens == len(tools.ids_of(events))
    assert tools.text_of(pool.wait_end(neighbour)) == tools.answer("neighbour", 60)
    tools.eventually(pool.drained)


def test_cancel_before_any_worker_ends_without_running(pool, tools):
    job = pool.submit(prompt="never", max_tokens=5)
    pool.redis.hset(pool.keys.job(job), "cancel", 1)
    pool.start()
    assert [type(e) for e in pool.wait_end(job)] == [End]
    assert pool.state(job)["status"] == "cancelled"


def test_deadline_ends_a_running_job_with_its_tokens(pool, tools):
    pool.start(step_ms=20)
    job = pool.submit(prompt="slow", max_tokens=4000, temperature=0, ttl_ms=500)
    events = pool.wait_end(job)
    assert events[-1].error["code"] == "deadline_exceeded"
    assert 0 < len(tools.ids_of(events)) < 60


BAD = {
    "no prompt": ({"max_tokens": 5}, "invalid_request", "prompt"),
    "wrong type": ({"prompt": "x", "max_tokens": "many"}, "invalid_request", "max_tokens"),
    "NaN": ({"prompt": "x", "temperature": "nan"}, "invalid_request", "temperature"),
    "negative": ({"prompt": "x", "max_tokens": -1}, "invalid_request", "max_tokens"),
    "huge": ({"prompt": "x", "max_tokens": "1" + "0" * 30}, "invalid_request", "max_tokens"),
    "too long": ({"prompt": "x" * 9000, "max_tokens": 1}, "context_length_exceeded", "prompt"),
    "other model": ({"prompt": "x", "model": "gpt-9"}, "unknown_model", "model"),
    "10 MB": ({"prompt": "x" * 10_000_000}, "too_large", None),
    "not JSON": ({"body": "{"}, "invalid_request", "body"),
    "a list": ({"body": "[1]"}, "invalid_request", "body"),
    "deep": ({"messages": "[" * 100_000}, "invalid_request", "messages"),
    "bytes": ({"prompt": b"\xff\xfe"}, "invalid_request", "prompt"),
    "strange field": ({b"\xff\xfe": b"\xff", "prompt": "x", "top_p": 7}, "invalid_request", "top_p"),
    "newer": ({"v": 9, "prompt": "x"}, "invalid_request", "v"),
    "empty prompt": ({"prompt": ""}, "invalid_request", "prompt"),
    "tools": ({"prompt": "x", "tools": "[{}]"}, "invalid_request", "tools"),
}


def test_bad_input_is_answered_once_with_code_and_field_and_the_worker_lives(pool, tools):
    worker = pool.start()
    jobs = {name: pool.submit_raw(fields) for name, (fields, _, _) in BAD.items()}
    found = {}
    for name, job in jobs.items():
        events = pool.wait_end(job)
        error = events[-1].error
        found[name] = (len(events), error["code"], error.get("field"))
    expected = {name: (1, code, field) for name, (_, code, field) in BAD.items()}
    expected["10 MB"] = (1, "too_large", found["10 MB"][2])
    assert found == expected
    good = pool.submit(prompt="fine", max_tokens=3, temperature=0)
    assert tools.text_of(pool.wait_end(good)) == tools.answer("fine", 3)
    assert worker.poll() is None
    tools.eventually(pool.drained)
    assert pool.redis.xlen(pool.keys.undecodable) >= 1


def test_the_same_id_twice_runs_once(pool, tools):
    pool.start(step_ms=10)
    pool.submit(id="twin", prompt="one", max_tokens=30, temperature=0)
    pool.submit(id="twin", prompt="two", max_tokens=30, temperature=0)
    events = pool.wait_end("twin")
    assert tools.text_of(events) == tools.answer("one", 30)
    tools.eventually(pool.drained)
    assert [type(e) for e in events].count(Finish) == 1


def test_no_redis_at_start_says_so_once_and_recovers(pool, tools, redis_server):
    redis_server.kill()
    worker = pool.start("--log-format", "json", wait=False)
    while "redis_unreachable" not in (line := worker.stderr.readline()):
        assert line, "it left"
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(2)  # four more tries
    redis_server.start()
    job = pool.submit(prompt="back", max_tokens=3, temperature=0)
    assert tools.text_of(pool.wait_end(job)) == tools.answer("back", 3)
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=10)
    assert "redis_unreachable" not in said


def test_redis_restarted_under_a_running_job(pool, tools, redis_server):
    pool.start(step_ms=20)
    job = pool.submit(prompt="redo", max_tokens=60, temperature=0)
    pool.wait_tokens(job, 5)
    tools.eventually(lambda: pool.redis.info("persistence")["aof_pending_bio_fsync"] == 0)
    redis_server.restart()
    tools.eventually(lambda: pool.state(job).get("t_end"))
    events = pool.wait_end(job)
    assert tools.text_of(events) == tools.answer("redo", 60)


def test_a_worker_whose_step_never_ends_leaves_and_another_goes_on(pool, tools):
    stuck = pool.start("--stall-timeout-s", "1", model="simulated:hang_on=HANG,step_ms=10")
    job = pool.submit(prompt="neighbour", max_tokens=200, temperature=0)
    pool.wait_tokens(job, 5)
    culprit = pool.submit(prompt="HANG", max_tokens=5, temperature=0)
    assert stuck.wait(10) == 70
    assert "engine_stuck" in stuck.stderr.read()
    pool.start()
    assert tools.text_of(pool.wait_end(job)) == tools.answer("neighbour", 200)
    assert tools.text_of(pool.wait_end(culprit)) == tools.answer("HANG", 5)


def test_twelve_jobs_over_two_workers_finish_once_each(pool, tools):
    pool.start("--max-num-seqs", "4", step_ms=3)
    pool.start("--max-num-seqs", "4", step_ms=3)
    jobs = {pool.submit(prompt=f"many {n}", max_tokens=20 + n, temperature=0): n for n in range(12)}
    for job, n in jobs.items():
        assert tools.text_of(pool.wait_end(job)) == tools.answer(f"many {n}", 20 + n)
    assert len({pool.state(job)["worker"] for job in jobs}) == 2
    tools.eventually(pool.drained)

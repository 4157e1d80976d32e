"""`strict_deadline` of a plain XADD or a fork: judged when the entry is sorted, refused with the estimate."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace.messages import Delta, End

pytestmark = pytest.mark.redis

COST = 4 * 100 + 1  # of JOB, in fair sharing's tokens
JOB = {"prompt": "", "max_tokens": 100}
STRICT = JOB | {"strict_deadline": "1"}


@pytest.fixture
async def busy(pool: Any) -> Any:
    """Five jobs a second, ten of them waiting, each taking a second: one more takes three seconds."""
    pace = {"pace:cost": COST * 5, "pace:ms": 1000, "pace:token_ms": 10, "pace:output": 100}
    await pool.redis.hset(pool.keys.vtime, mapping=pace)
    for n in range(10):
        await pool.add(**JOB, id=f"fill-{n}")
    await pool.pick(0)
    return pool


async def waiting(pool: Any) -> int:
    return int(await pool.redis.zcard(pool.keys.ready("normal")))


@pytest.mark.parametrize("own_id", ["mine", None])
async def test_what_cannot_end_in_time_is_refused_with_the_estimate(busy: Any, own_id: str | None) -> None:
    clocks = await busy.redis.hgetall(busy.keys.vtime)
    entry = await busy.add(**STRICT, ttl_ms=2500, **({"id": own_id} if own_id else {}))
    await busy.pick(0)
    assert await waiting(busy) == 10  # it is not even queued, and nobody is charged
    assert {**await busy.redis.hgetall(busy.keys.vtime), b"seen": b""} == {**clocks, b"seen": b""}
    assert await busy.scripts.overdue()
    assert (await busy.scripts.reap()).ended == 1
    job_id = own_id or f"normal-{entry}"
    state = await busy.job(job_id)
    (end,) = await busy.log(job_id)
    assert isinstance(end, End)
    assert end.error == json.loads(state["error"])
    assert re.fullmatch(r"It would take about 30\d\d ms, longer than ttl_ms.", end.error.pop("message"))
    assert end.error == {"code": "cannot_meet_deadline", "retryable": True, "field": "ttl_ms"}
    assert state["status"] == "failed"
    assert not await busy.redis.zcard(busy.keys.deadlines)
    assert not await busy.redis.hexists(busy.keys.ids, f"normal-{entry}")
    assert await busy.redis.xlen(busy.keys.queue("normal")) == 10


@pytest.mark.parametrize("fields", [STRICT | {"ttl_ms": 9000}, JOB | {"ttl_ms": 2500}, STRICT])
async def test_what_fits_or_did_not_ask_waits(busy: Any, fields: dict[str, Any]) -> None:
    await busy.add(**fields)
    await busy.pick(0)
    assert await waiting(busy) == 11
    assert not await busy.scripts.overdue()


async def test_what_came_behind_it_does_not_count(busy: Any) -> None:
    await busy.add(**STRICT, ttl_ms=3500)
    for _ in range(100):
        await busy.add(**JOB)
    await busy.pick(0)
    assert not await busy.scripts.overdue()


async def test_those_sorted_in_the_same_call_do(busy: Any) -> None:
    for _ in range(10):
        await busy.add(**JOB)
    await busy.add(**STRICT, ttl_ms=4500)  # 20 jobs before it: 5 s with its own
    await busy.pick(0)
    assert await busy.scripts.overdue()


async def test_without_a_measured_pace_nothing_is_refused(pool: Any) -> None:
    await pool.add(**STRICT, ttl_ms=10_000)
    assert len(await pool.pick(1)) == 1


async def test_a_fork_is_refused_with_its_tokens(busy: Any) -> None:
    said = [Delta(seq=1, text="a", ids=[1])]
    await busy.scripts.fork("normal", "branch", STRICT | {"ttl_ms": 2500}, said, prompt_tokens=3)
    await busy.pick(0)
    await busy.scripts.reap()
    state = await busy.job("branch")
    assert json.loads(state["error"])["code"] == "cannot_meet_deadline"
    assert json.loads(state["usage"])["completion_tokens"] == 1


async def test_what_the_submit_script_has_judged_is_not_judged_again(busy: Any) -> None:
    await busy.scripts.submit("normal", "accepted", STRICT | {"ttl_ms": 3100})
    await busy.redis.hset(busy.keys.vtime, "pace:token_ms", 1000)
    await busy.pick(0)
    assert not await busy.scripts.overdue()


async def test_a_worker_that_gets_it_first_ends_it_as_well(busy: Any) -> None:
    entry = await busy.add(**STRICT, ttl_ms=2500)
    await busy.pick(0)
    await busy.redis.zadd(busy.keys.ready("normal"), {entry: -1})  # as the reaper puts back what is nowhere
    (picked,) = await busy.pick(1)
    (claimed,) = await busy.claim([picked])
    assert claimed.outcome == "expired"
    assert json.loads((await busy.job(claimed.job_id))["error"])["code"] == "cannot_meet_deadline"

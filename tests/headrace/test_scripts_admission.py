"""What a job is told when it is taken in: how much is ahead, when it starts, whether that is too late."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import HeadraceError, Overloaded

pytestmark = pytest.mark.redis
COST = 1 + 4 * 100  # of an empty prompt's estimate and 100 tokens
JOB = {"prompt": "", "max_tokens": 100}


async def set_pace(pool: Any, **values: float) -> None:
    await pool.redis.hset(pool.keys.vtime, mapping={f"pace:{name}": value for name, value in values.items()})


async def fill(pool: Any, count: int) -> None:
    for n in range(count):
        await pool.scripts.submit("normal", f"fill-{n}", JOB)
    await pool.pick(0)


async def test_overloaded_says_when_a_tenth_will_have_been_served(pool: Any) -> None:
    await set_pace(pool, cost=COST * 5, ms=1000)  # five jobs a second
    await fill(pool, 100)
    with pytest.raises(Overloaded) as caught:
        await pool.scripts.submit("normal", "late", JOB, max_entries=100)
    assert caught.value.retry_after_s == 2  # ten jobs
    assert caught.value.headers == {"Retry-After": "2"}


@pytest.mark.parametrize("ceiling", [{"max_entries": 3}, {"max_bytes": 2000}])
async def test_ceilings_without_a_pace_ask_to_come_back_in_a_second(
    pool: Any, ceiling: dict[str, int]
) -> None:
    await fill(pool, 3)
    with pytest.raises(Overloaded) as caught:
        await pool.scripts.submit("normal", "late", JOB | {"prompt": "x"}, **ceiling)
    assert caught.value.retry_after_s == 1


async def test_every_accepted_job_knows_what_is_ahead_and_when_it_starts(pool: Any) -> None:
    await set_pace(pool, cost=COST * 5, ms=1000)
    await fill(pool, 10)
    await pool.scripts.submit("normal", "next", JOB)
    job = await pool.job("next")
    assert int(job["ahead_tokens"]) == 10 * COST
    assert int(job["eta_ms"]) == 2000


async def test_a_tenant_without_jobs_does_not_wait_behind_a_flood(pool: Any) -> None:
    await set_pace(pool, cost=COST * 5, ms=1000)
    await fill(pool, 50)
    await pool.scripts.submit("normal", "other", JOB, tenant="quiet")
    assert int((await pool.job("other"))["eta_ms"]) <= 200


async def test_only_a_strict_deadline_is_refused_and_the_others_are_counted(pool: Any) -> None:
    await set_pace(pool, cost=COST * 5, ms=1000, token_ms=10, output=100)
    await fill(pool, 10)
    for strict in ("true", "1", b"true"):
        with pytest.raises(HeadraceError) as caught:
            await pool.scripts.submit("normal", "strict", JOB | {"ttl_ms": 2500, "strict_deadline": strict})
        assert (caught.value.code, caught.value.field) == ("cannot_meet_deadline", "ttl_ms")
        assert "3000 ms" in caught.value.message
    assert await pool.job("strict") == {}
    await pool.scripts.submit("normal", "lax", JOB | {"ttl_ms": 2500})
    await pool.scripts.submit("normal", "fits", JOB | {"ttl_ms": 9000, "strict_deadline": "true"})
    assert await pool.redis.hmget(pool.keys.vtime, "shadow:jobs", "shadow:late") == [b"2", b"1"]


async def test_a_false_alarm_is_counted(pool: Any, kit: Any) -> None:
    await set_pace(pool, cost=1, ms=1000, token_ms=1e6, output=100)
    await pool.scripts.submit("normal", "lax", JOB | {"ttl_ms": 60_000})
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1), *kit.ending(2, completion=1)]))
    assert await pool.redis.hget(pool.keys.vtime, "shadow:wrong") == b"1"


async def test_the_pace_is_measured_while_something_waits(pool: Any) -> None:
    await fill(pool, 40)
    for _ in range(20):
        await pool.pick(2)
    cost, ms = await pool.redis.hmget(pool.keys.vtime, "pace:cost", "pace:ms")
    assert float(cost) > 30 * COST
    assert float(ms) >= 0
    assert float(await pool.redis.hget(pool.keys.vtime, "b:normal")) == 0


async def test_what_is_cancelled_waits_no_more(pool: Any) -> None:
    await fill(pool, 4)
    for n in range(3):
        await pool.scripts.cancel(f"fill-{n}")
    assert float(await pool.redis.hget(pool.keys.vtime, "b:normal")) == COST

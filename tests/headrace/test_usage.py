"""The ledger: every token counted once, whoever ends the job, whatever is repeated or lost."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.keys import this_month
from headrace.usage import UsageTotals, usage_by_tenant, usage_of, valid_month

pytestmark = pytest.mark.redis


async def totals(pool: Any, tenant: str = "acme") -> UsageTotals:
    return await usage_of(pool.redis, [pool.keys.pool], tenant)


async def test_a_job_that_ends_is_billed_once(pool: Any, kit: Any) -> None:
    await pool.add(prompt="x", tenant="acme")
    entry, claimed = await pool.take()
    last = kit.item(entry, claimed, [kit.delta(1), kit.delta(2), *kit.ending(3, completion=2)])
    assert await pool.emit(last) == ["ok"]
    assert await pool.emit(last) == ["ok"]  # the reply was lost
    assert await totals(pool) == UsageTotals(jobs=1, prompt=3, output=2)
    assert await pool.redis.ttl(pool.keys.usage(this_month())) > 86_400


async def test_waste_is_told_apart(pool: Any, kit: Any) -> None:
    await pool.add(prompt="x", tenant="acme")
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1), kit.cancelled(2, completion=1)]))
    await pool.add(prompt="y", tenant="acme", ttl_ms=3_600_000)
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1), kit.delta(2)]))
    await pool.expire_leases()
    await pool.redis.hset(pool.keys.job(claimed.job_id), "deadline", 1)
    (again,) = await pool.pick()
    (outcome,) = await pool.claim([again])
    assert outcome.outcome == "expired"  # ended by the script, not by a worker
    found = await totals(pool)
    assert (found.jobs, found.prompt, found.output) == (2, 6, 3)
    assert (found.cancelled, found.failed, found.recomputed) == (1, 2, 0)
    assert found.wasted == 3


async def test_what_a_takeover_computes_again(pool: Any, kit: Any) -> None:
    await pool.add(prompt="x", tenant="acme")
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1), kit.delta(2)]))
    await pool.expire_leases()
    await pool.take("w2")
    assert (await totals(pool)).recomputed == 3 + 2


async def test_a_job_cancelled_in_the_queue_costs_nothing(pool: Any) -> None:
    await pool.scripts.submit("normal", "j", {"prompt": "x"}, tenant="acme")
    assert await pool.scripts.cancel("j") == "ended"
    assert await totals(pool) == UsageTotals(jobs=1)


async def test_a_damaged_ledger_keeps_no_job_from_its_end(pool: Any, kit: Any) -> None:
    await pool.redis.set(pool.keys.usage(this_month()), "not a hash")
    await pool.add(prompt="x")
    entry, claimed = await pool.take()
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(1), *kit.ending(2, 1)])) == ["ok"]
    assert (await pool.job(claimed.job_id))["status"] == "done"


async def test_by_tenant(pool: Any, kit: Any) -> None:
    for tenant in ("b", "a", "b"):
        await pool.add(prompt="x", tenant=tenant)
        entry, claimed = await pool.take()
        await pool.emit(kit.item(entry, claimed, [kit.delta(1), *kit.ending(2, 1)]))
    found = await usage_by_tenant(pool.redis, [pool.keys.pool, "another"])
    assert [(tenant, each.jobs, each.total) for tenant, each in found.items()] == [("a", 1, 4), ("b", 2, 8)]
    assert await usage_by_tenant(pool.redis, [pool.keys.pool], "2001-01") == {}


@pytest.mark.parametrize(("text", "right"), [("2026-11", True), ("2026-13", False), ("26-1", False)])
def test_months(text: str, right: bool) -> None:
    assert valid_month(text) is right

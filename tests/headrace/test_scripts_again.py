"""A worker whose pick or claim went unanswered comes to its jobs at once, and no death is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("guarded")]


async def test_what_a_lost_pick_handed_out_is_handed_out_again(pool: Any) -> None:
    for job_class in ("normal", "high", "normal"):
        await pool.add(job_class)
    lost = await pool.pick(2, "w1")
    (other,) = await pool.pick(5, "w2", known=[])
    assert other.member not in [e.member for e in lost]
    again = await pool.pick(5, "w1", known=[])
    assert [e.member for e in again] == [e.member for e in lost]
    assert [c.outcome for c in await pool.claim(again, "w1")] == ["run", "run"]


async def test_what_the_worker_knows_and_what_others_hold_stays(pool: Any) -> None:
    for _ in range(3):
        await pool.add()
    known, unknown = await pool.pick(2, "w1")
    await pool.pick(1, "w2")
    assert [e.member for e in await pool.pick(5, "w1", known=[known.member])] == [unknown.member]
    assert await pool.pick(5, "w1", known=[known.member, unknown.member]) == []
    assert await pool.pick(5, "w1") == []  # nothing was missed


async def test_no_more_than_there_is_room_for(pool: Any) -> None:
    for _ in range(4):
        await pool.add()
    lost = await pool.pick(4, "w1")
    first = await pool.pick(3, "w1", known=[])
    second = await pool.pick(3, "w1", known=[e.member for e in first])
    assert [e.member for e in [*first, *second]] == [e.member for e in lost]
    assert await pool.pick(0, "w1", known=[]) == []


async def test_suspects_are_handed_out_again_apart(pool: Any) -> None:
    for _ in range(4):
        await pool.add()
    await pool.claim(await pool.pick(4, "w1"), "w1")
    await pool.expire_leases()
    lost = await pool.scripts.pick("w2", 5, budget_tokens=10_000, lease_ms=60_000)
    assert (lost.apart, len(lost.entries)) == (True, 2)
    again = await pool.scripts.pick("w2", 5, budget_tokens=10_000, lease_ms=60_000, known=[])
    assert (again.apart, again.entries) == (True, lost.entries)
    busy = await pool.scripts.pick(
        "w2", 5, budget_tokens=10_000, lease_ms=60_000, known=[], holds_nothing=False
    )
    assert (busy.on_duty, busy.entries) == (True, [])


@pytest.mark.parametrize(("later", "deaths"), [("a1.8", 0), ("b2.0", 1), (None, 1)])
async def test_who_claims_its_own_job_again_did_not_die(pool: Any, later: str | None, deaths: int) -> None:
    await pool.add()
    entries = await pool.pick(1, "w1")
    (first,) = await pool.claim(entries, "w1", nonce="a1.7")
    again = await pool.pick(1, "w1", known=[])
    (second,) = await pool.claim(again, "w1", nonce=later)
    assert (second.outcome, second.epoch) == ("run", first.epoch + 1)
    assert len(json.loads((await pool.job(second.job_id)).get("history", "[]"))) == deaths

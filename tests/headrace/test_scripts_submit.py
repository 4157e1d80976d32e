"""Taking jobs in, and cancelling them in every state."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from headrace.errors import HeadraceError, Overloaded
from headrace.messages import Delta

pytestmark = pytest.mark.redis


async def test_submit_makes_entry_and_hash(pool: Any, kit: Any) -> None:
    submitted = await pool.scripts.submit("high", "mine", {"prompt": "a"}, tenant="acme", job_ttl_ms=50_000)
    assert (submitted.job_id, submitted.existing) == ("mine", False)
    job = await pool.job("mine")
    assert (job["status"], job["seq"], job["tenant"], job["entry"]) == (
        "queued",
        "0",
        "acme",
        submitted.entry_id,
    )
    assert 0 < await pool.redis.pttl(pool.keys.job("mine")) <= 50_000
    entry, claimed = await pool.take()
    assert entry.fields == {b"id": b"mine", b"tenant": b"acme", b"prompt": b"a"}
    assert (claimed.job_id, claimed.outcome) == ("mine", "run")
    assert await pool.redis.pttl(pool.keys.job("mine")) == -1
    await pool.emit(kit.item(entry, claimed, kit.ending(1)))
    await pool.assert_no_entries_left()


async def test_the_same_submission_again_is_the_same_job(pool: Any) -> None:
    first = await pool.scripts.submit("normal", "mine", {"prompt": "a"})
    again = await pool.scripts.submit("normal", "mine", {"prompt": "a"})
    assert (again.entry_id, again.existing) == (first.entry_id, True)
    with pytest.raises(HeadraceError, match="conflict") as caught:
        await pool.scripts.submit("normal", "mine", {"prompt": "b"})
    assert caught.value.field == "id"
    assert await pool.redis.xlen(pool.keys.queue("normal")) == 1


async def test_fifty_submissions_of_one_key_are_one_job(pool: Any) -> None:
    results = await asyncio.gather(
        *(
            pool.scripts.submit("normal", f"try-{i}", {"prompt": "a"}, idem_key="k", body_hash="h")
            for i in range(50)
        )
    )
    assert len({result.job_id for result in results}) == 1
    assert sum(not result.existing for result in results) == 1
    assert await pool.redis.xlen(pool.keys.queue("normal")) == 1
    with pytest.raises(HeadraceError) as caught:
        await pool.scripts.submit("normal", "other", {"prompt": "b"}, idem_key="k", body_hash="g")
    assert (caught.value.code, caught.value.field) == ("conflict", "idempotency_key")
    await pool.scripts.submit("normal", "theirs", {"prompt": "b"}, tenant="else", idem_key="k", body_hash="g")


async def test_ceilings(pool: Any) -> None:
    for i in range(3):
        await pool.scripts.submit("low", f"a{i}", {"prompt": "x" * 4096}, max_entries=3)
    with pytest.raises(HeadraceError, match="overloaded"):
        await pool.scripts.submit("high", "b", {"prompt": "a"}, max_entries=3)
    with pytest.raises(HeadraceError, match="overloaded"):
        await pool.scripts.submit("high", "b", {"prompt": "a"}, max_bytes=10_000)
    await pool.scripts.submit("high", "b", {"prompt": "a"}, max_entries=4, max_bytes=1_000_000)


async def test_the_ceiling_of_bytes_sees_large_entries_behind_small_ones(pool: Any) -> None:
    for _ in range(600):  # enough to fill the nodes that MEMORY USAGE samples unless told otherwise
        await pool.add(prompt="x" * 60)
    for _ in range(5):
        await pool.add(prompt="x" * 500_000)
    said = [Delta(seq=1, text="x", ids=[1])]
    for submit in (pool.scripts.submit, partial(pool.scripts.fork, events=said, prompt_tokens=1)):
        with pytest.raises(Overloaded, match="as many bytes") as caught:
            await submit("high", "b", {"prompt": "a"}, max_bytes=2_000_000)
        assert caught.value.retry_after_s >= 1
    await pool.scripts.submit("high", "b", {"prompt": "a"}, max_bytes=4_000_000)


async def test_an_old_cancel_flag_does_not_touch_a_new_job(pool: Any) -> None:
    assert await pool.scripts.cancel("later") == "unknown"
    assert await pool.redis.pttl(pool.keys.job("later")) > 0
    await pool.scripts.submit("normal", "later", {"prompt": "a"})
    _, claimed = await pool.take()
    assert claimed.outcome == "run"


async def test_an_id_expired_and_used_again_is_a_new_job(pool: Any, kit: Any) -> None:
    for prompt in ("one", "two"):
        await pool.scripts.submit("normal", "again", {"prompt": prompt})
        entry, claimed = await pool.take()
        assert (claimed.outcome, claimed.epoch, claimed.last_seq) == ("run", 1, 0)
        last = kit.item(entry, claimed, kit.ending(1))
        await pool.scripts.emit([last], retention_ms=1)
        await asyncio.sleep(0.01)
        assert not await pool.redis.exists(pool.keys.job("again"), pool.keys.log("again"))


async def test_two_entries_with_one_id_run_once(pool: Any, kit: Any) -> None:
    for _ in range(2):
        await pool.add(id="twin", prompt="a")
    entries = await pool.pick(2)
    first, second = await pool.claim(entries)
    assert (first.outcome, second.outcome) == ("run", "duplicate")
    await pool.emit(kit.item(entries[0], first, [kit.delta(1), *kit.ending(2, 1)]))
    await pool.add(id="twin", prompt="a")
    _, third = await pool.take()
    assert third.outcome == "duplicate"
    assert [event.seq for event in await pool.log("twin")] == [1, 2, 3]
    await pool.assert_no_entries_left()


async def test_cancel_before_any_worker_read_it(pool: Any) -> None:
    entry_id = await pool.add()
    assert await pool.scripts.cancel(f"normal-{entry_id}") == "ended"
    assert await pool.scripts.cancel(f"normal-{entry_id}") == "over"
    assert await pool.pick() == []
    (end,) = await pool.log(f"normal-{entry_id}")
    assert (end.status, end.usage.completion_tokens, end.error) == ("cancelled", 0, None)
    await pool.assert_no_entries_left()


async def test_cancel_by_plain_commands_before_pickup(pool: Any) -> None:
    entry_id = await pool.add()
    await pool.redis.hset(pool.keys.job(f"normal-{entry_id}"), "cancel", 1)
    _, claimed = await pool.take()
    assert claimed.outcome == "cancelled"
    assert (await pool.job(claimed.job_id))["status"] == "cancelled"
    await pool.assert_no_entries_left()


@pytest.mark.parametrize("moment", ["queued", "sorted", "picked", "claimed", "one token", "ended"])
async def test_cancel_at_each_moment(pool: Any, kit: Any, moment: str) -> None:
    await pool.scripts.submit("normal", "job", {"prompt": "a"})
    moments = ["queued", "sorted", "picked", "claimed", "one token", "ended"]
    stage = moments.index(moment)
    if stage == 1:
        await pool.pick(0)
    entries = await pool.pick(1) if stage >= 2 else []
    claims = await pool.claim(entries) if stage >= 3 else []
    if stage >= 4:
        await pool.emit(kit.item(entries[0], claims[0], [kit.delta(1)]))
    if stage >= 5:
        await pool.emit(kit.item(entries[0], claims[0], kit.ending(2, 1)))
    expected = "ended" if stage < 2 else "over" if stage == 5 else "flagged"
    assert await pool.scripts.cancel("job") == expected
    if stage == 2:
        (claimed,) = await pool.claim(entries)
        assert claimed.outcome == "cancelled"
    if stage in (3, 4):
        assert await pool.emit(kit.item(entries[0], claims[0], [kit.delta(stage - 2)])) == ["cancel"]
        end = kit.cancelled(stage - 1, stage - 2)
        assert await pool.emit(kit.item(entries[0], claims[0], [end])) == ["ok"]
    assert (await pool.job("job"))["status"] == ("done" if stage == 5 else "cancelled")
    assert sum(event.__class__.__name__ == "End" for event in await pool.log("job")) == 1
    await pool.assert_no_entries_left()


async def test_cancel_survives_the_death_of_the_worker(pool: Any, kit: Any) -> None:
    await pool.add()
    entry, claimed = await pool.take("w1")
    await pool.emit(kit.item(entry, claimed, [kit.delta(1, "a"), kit.delta(2, "b")]))
    await pool.scripts.cancel(claimed.job_id)
    await pool.expire_leases()
    _, again = await pool.take("w2")
    assert again.outcome == "cancelled"
    end = (await pool.log(claimed.job_id))[-1]
    assert (end.status, end.usage) == ("cancelled", kit.usage(2))
    assert '"text":"ab"' in (await pool.job(claimed.job_id))["result"]
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(3)])) == ["stale"]
    await pool.assert_no_entries_left()


async def test_deadlines_end_jobs_that_no_worker_reads(pool: Any, kit: Any) -> None:
    await pool.add(ttl_ms=1)
    await pool.add(ttl_ms=1, id="own")
    await pool.add(ttl_ms=100_000)
    await asyncio.sleep(0.005)
    assert (await pool.scripts.reap()).ended == 2
    assert (await pool.scripts.reap()).ended == 0
    (end,) = await pool.log("own")
    assert end.error["code"] == "deadline_exceeded"
    entry, claimed = await pool.take()
    assert claimed.outcome == "run"
    await pool.emit(kit.item(entry, claimed, kit.ending(1)))
    await pool.assert_no_entries_left()


async def test_a_running_job_past_its_deadline_is_its_workers_business(pool: Any, kit: Any) -> None:
    await pool.add(ttl_ms=30)
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1, "a", [1, 2, 3])]))
    await asyncio.sleep(0.05)
    assert (await pool.scripts.reap()).ended == 0
    await pool.expire_leases()
    assert (await pool.scripts.reap()).ended == 1
    end = (await pool.log(claimed.job_id))[-1]
    assert (end.error["code"], end.usage) == ("deadline_exceeded", kit.usage(3))
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(2)])) == ["stale"]
    await pool.assert_no_entries_left()


async def test_a_submitted_job_whose_entry_is_gone_ends_as_lost(pool: Any, kit: Any) -> None:
    await pool.scripts.submit("normal", "trimmed", {"prompt": "a"})
    await pool.redis.xtrim(pool.keys.queue("normal"), maxlen=0, approximate=False)
    await pool.add("high", id="runs", prompt="a")
    _, claimed = await pool.take()
    assert claimed.job_id == "runs"
    await pool.add("high", id="wiped", prompt="a")
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1)]))
    await pool.scripts.submit("low", "waits", {"prompt": "a"})
    await pool.redis.zrem(pool.keys.leases, entry.member)
    await pool.redis.xdel(pool.keys.queue("high"), entry.entry_id)
    assert sum([(await pool.scripts.reap()).ended for _ in range(5)]) == 2
    for job_id, status in (
        ("trimmed", "failed"),
        ("wiped", "failed"),
        ("waits", "queued"),
        ("runs", "running"),
    ):
        assert (await pool.job(job_id))["status"] == status
    assert (await pool.log("wiped"))[-1].error["code"] == "lost"


async def test_reap_deletes_only_consumers_that_hold_nothing(pool: Any, kit: Any) -> None:
    for _ in range(2):
        await pool.add()
    entry, claimed = await pool.take("done")
    await pool.emit(kit.item(entry, claimed, kit.ending(1)))
    await pool.take("busy")
    await pool.redis.xgroup_createconsumer(pool.keys.queue("normal"), "workers", "idle")
    await pool.redis.xgroup_createconsumer(pool.keys.queue("normal"), "workers", "carded")
    await pool.redis.zadd(pool.keys.workers, {"carded": time.time() * 1000 + 60_000})
    assert (await pool.scripts.reap(consumer_idle_ms=0)).consumers == 2
    consumers = await pool.redis.xinfo_consumers(pool.keys.queue("normal"), "workers")
    assert {consumer["name"] for consumer in consumers} == {b"ready", b"busy", b"carded"}


async def test_reap_gives_strays_a_ttl_and_leaves_jobs_alone(pool: Any) -> None:
    await pool.redis.hset(pool.keys.job("stray"), "cancel", 1)
    await pool.redis.set(pool.keys.job("text"), "no hash")
    await pool.add()
    _, claimed = await pool.take()
    reaped = [await pool.scripts.reap(stray_ttl_ms=1000) for _ in range(5)]
    assert sum(one.strays for one in reaped) == 1
    assert 0 < await pool.redis.pttl(pool.keys.job("stray")) <= 1000
    assert await pool.redis.pttl(pool.keys.job(claimed.job_id)) == -1


async def test_reap_forgets_clocks_that_were_passed(pool: Any, kit: Any) -> None:
    for i in range(20):
        await pool.add(tenant=f"t{i}")
        entry, claimed = await pool.take()
        await pool.emit(kit.item(entry, claimed, kit.ending(1)))
    await pool.add(tenant="last")
    await pool.pick(1)
    await pool.scripts.reap()
    fields = [name for name in await pool.redis.hkeys(pool.keys.vtime) if name.startswith(b"f:")]
    assert len(fields) <= 2

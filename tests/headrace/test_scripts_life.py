"""A job's way through the scripts, and every point at which a worker can die."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.redis


async def test_a_plain_xadd_runs_to_its_end(pool: Any, kit: Any) -> None:
    entry_id = await pool.add(prompt="hello", max_tokens=4)
    entry, claimed = await pool.take()
    assert (entry.entry_id, claimed.outcome, claimed.epoch, claimed.attempt) == (entry_id, "run", 1, 1)
    assert (claimed.left_ms, claimed.last_seq) == (None, 0)
    assert (await pool.job(claimed.job_id))["status"] == "running"
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(1)])) == ["ok"]
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(2), *kit.ending(3, 2)])) == ["ok"]
    job = await pool.job(f"normal-{entry_id}")
    assert (job["status"], job["seq"], job["worker"], job["attempt"]) == ("done", "4", "w1", "1")
    assert json.loads(job["usage"])["completion_tokens"] == 2
    stamps = [int(job[name]) for name in ("t_submit", "t_start", "t_first", "t_end")]
    assert stamps == sorted(stamps)
    assert [event.seq for event in await pool.log(claimed.job_id)] == [1, 2, 3, 4]
    await pool.assert_no_entries_left()


async def test_live_channel_carries_the_log(pool: Any, kit: Any) -> None:
    from headrace.log import decode_live

    entry_id = await pool.add()
    subscriber = pool.redis.pubsub()
    await subscriber.subscribe(pool.keys.live(f"normal-{entry_id}"))
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1, "é\n"), *kit.ending(2, 1)]))
    seen = []
    while len(seen) < 3:
        message = await subscriber.get_message(ignore_subscribe_messages=True, timeout=5)
        if message is not None:
            seen.append(decode_live(message["data"]))
    assert seen == await pool.log(claimed.job_id)
    await subscriber.aclose()


async def test_death_between_pick_and_claim_costs_no_attempt(pool: Any, kit: Any) -> None:
    await pool.add()
    (first,) = await pool.pick(worker="w1")
    assert await pool.pick(worker="w2") == []
    await pool.expire_leases()
    (again,) = await pool.pick(worker="w2")
    assert again == first
    (claimed,) = await pool.claim([again], "w2")
    assert (claimed.outcome, claimed.epoch, claimed.attempt) == ("run", 1, 1)


async def test_a_sleeper_that_picked_cannot_claim_what_another_took(pool: Any, kit: Any) -> None:
    await pool.add()
    picked = await pool.pick(worker="w1")
    await pool.expire_leases()
    entry, claimed = await pool.take("w2")
    (late,) = await pool.claim(picked, "w1")
    assert late.outcome == "stale"
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(1)])) == ["ok"]


async def test_a_repeated_claim_gives_the_same_answer(pool: Any, kit: Any) -> None:
    await pool.add(ttl_ms=50_000)
    picked = await pool.pick()
    (first,) = await pool.claim(picked, nonce="a")
    (second,) = await pool.claim(picked, nonce="a")
    assert (second.outcome, second.epoch, second.attempt) == ("run", first.epoch, first.attempt)
    assert 0 < second.left_ms <= first.left_ms <= 50_000
    (third,) = await pool.claim(picked, nonce="b")
    assert (third.epoch, third.attempt) == (2, 2)


async def test_death_after_claim_hands_over_with_the_log(pool: Any, kit: Any) -> None:
    await pool.add()
    entry, old = await pool.take("w1")
    await pool.emit(kit.item(entry, old, [kit.delta(1), kit.delta(2)]))
    await pool.expire_leases()
    entry, new = await pool.take("w2")
    assert (new.outcome, new.epoch, new.attempt, new.last_seq) == ("run", 2, 2, 2)
    assert await pool.emit(kit.item(entry, old, [kit.delta(3)])) == ["stale"]
    assert await pool.emit(kit.item(entry, old, kit.ending(3))) == ["stale"]
    assert (await pool.scripts.renew("w1", [("normal", entry.entry_id, old.job_id, 1)], lease_ms=9)).lost
    assert await pool.emit(kit.item(entry, new, [kit.delta(3), *kit.ending(4, 3)])) == ["ok"]
    assert [event.seq for event in await pool.log(new.job_id)] == [1, 2, 3, 4, 5]
    await pool.assert_no_entries_left()


async def test_emit_replayed_changes_nothing(pool: Any, kit: Any) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    step = kit.item(entry, claimed, [kit.delta(1), kit.delta(2)])
    assert await pool.emit(step) == ["ok"]
    assert await pool.emit(step) == ["ok"]
    longer = kit.item(entry, claimed, [kit.delta(2), kit.delta(3)])
    assert await pool.emit(longer) == ["ok"]
    last = kit.item(entry, claimed, kit.ending(4, 3))
    assert await pool.emit(last) == ["ok"]
    before = await pool.job(claimed.job_id)
    assert await pool.emit(last) == ["ok"]
    assert await pool.job(claimed.job_id) == before
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(6)])) == ["stale"]
    assert [event.seq for event in await pool.log(claimed.job_id)] == [1, 2, 3, 4, 5]


async def test_a_gap_is_refused(pool: Any, kit: Any) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(2)])) == ["gap"]
    assert await pool.log(claimed.job_id) == []


async def test_items_of_one_call_do_not_harm_each_other(pool: Any, kit: Any) -> None:
    for _ in range(5):
        await pool.add()
    entries = await pool.pick(5)
    claims = await pool.claim(entries)
    items = [kit.item(e, c, [kit.delta(1)]) for e, c in zip(entries, claims, strict=True)]
    await pool.redis.delete(pool.keys.job(claims[1].job_id))
    await pool.redis.set(pool.keys.job(claims[1].job_id), "no hash")
    await pool.redis.set(pool.keys.log(claims[2].job_id), "no stream")
    await pool.redis.hset(pool.keys.job(claims[3].job_id), "cancel", 1)
    assert await pool.emit(*items) == ["ok", "error", "error", "cancel", "ok"]


async def test_log_lost_while_running_is_reported_and_closed_by_force(pool: Any, kit: Any) -> None:
    from headrace.errors import HeadraceError
    from headrace.messages import End

    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1), kit.delta(2)]))
    await pool.redis.delete(pool.keys.log(claimed.job_id))
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(3)])) == ["lost"]
    end = End(seq=3, status="failed", error=HeadraceError("lost").to_wire())
    assert await pool.emit(kit.item(entry, claimed, [end], force=True)) == ["ok"]
    (event,) = await pool.log(claimed.job_id)
    assert event == end
    assert (await pool.job(claimed.job_id))["status"] == "failed"
    assert await pool.emit(kit.item(entry, claimed, [end], force=True)) == ["ok"]
    assert len(await pool.log(claimed.job_id)) == 1
    await pool.assert_no_entries_left()


async def test_force_ends_behind_everything_a_reader_saw(pool: Any, kit: Any) -> None:
    from headrace.errors import HeadraceError
    from headrace.messages import End

    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, [kit.delta(1), kit.delta(2)]))
    await pool.redis.flushall()
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(3)])) == ["lost"]
    end = End(seq=58, status="failed", error=HeadraceError("lost").to_wire())
    assert await pool.emit(kit.item(entry, claimed, [end], force=True)) == ["ok"]
    (event,) = await pool.log(claimed.job_id)
    assert (event.seq, event.status) == (58, "failed")
    await pool.assert_no_entries_left()


async def test_the_same_epoch_of_another_entry_is_stale(pool: Any, kit: Any) -> None:
    await pool.add(id="mine", prompt="a")
    entry, zombie = await pool.take("w1")
    await pool.redis.flushall()
    await pool.add(id="mine", prompt="b")
    await pool.take("w2")
    assert await pool.emit(kit.item(entry, zombie, [kit.delta(1)])) == ["stale"]


async def test_flushall_while_idle_makes_the_group_again(pool: Any, kit: Any) -> None:
    await pool.add()
    entry, claimed = await pool.take()
    await pool.emit(kit.item(entry, claimed, kit.ending(1)))
    await pool.redis.flushall()
    await pool.redis.script_flush()
    await pool.add()
    entry, claimed = await pool.take()
    assert claimed.outcome == "run"


async def test_release_keeps_the_attempt_and_fences_the_old_holder(pool: Any, kit: Any) -> None:
    for prompt in ("first", "second"):
        await pool.add(prompt=prompt)
    entry, claimed = await pool.take("w1")
    await pool.emit(kit.item(entry, claimed, [kit.delta(1)]))
    control = pool.redis.pubsub()
    await control.subscribe(pool.keys.ctl)
    held = ("normal", entry.entry_id, claimed.job_id, claimed.epoch)
    assert await pool.scripts.release("w1", [held]) == 1
    assert await pool.scripts.release("w1", [held]) == 0
    message = None
    while message is None:
        message = await control.get_message(ignore_subscribe_messages=True, timeout=5)
    assert message["data"] == b"ready"
    await control.aclose()
    assert (await pool.job(claimed.job_id))["status"] == "queued"
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(2)])) == ["stale"]
    again, new = await pool.take("w2")
    assert again.entry_id == entry.entry_id
    assert (new.outcome, new.epoch, new.attempt, new.last_seq) == ("run", 2, 1, 1)


async def test_release_of_a_pick_not_claimed(pool: Any, kit: Any) -> None:
    await pool.add()
    (entry,) = await pool.pick(worker="w1")
    held = ("normal", entry.entry_id, entry.member, 0)
    assert await pool.scripts.release("w2", [held]) == 0
    assert await pool.scripts.release("w1", [held]) == 1
    _, claimed = await pool.take("w2")
    assert (claimed.outcome, claimed.attempt) == ("run", 1)


async def test_renew_names_what_is_cancelled_and_keeps_the_rest(pool: Any, kit: Any) -> None:
    for _ in range(2):
        await pool.add()
    entries = await pool.pick(2)
    claims = await pool.claim(entries)
    held = [("normal", e.entry_id, c.job_id, c.epoch) for e, c in zip(entries, claims, strict=True)]
    await pool.scripts.cancel(claims[0].job_id)
    renewed = await pool.scripts.renew("w1", held, lease_ms=90_000)
    assert renewed.cancelled == {claims[0].job_id}
    assert renewed.lost == set()
    await pool.redis.delete(pool.keys.leases)
    await pool.scripts.renew("w1", held, lease_ms=90_000)
    assert await pool.redis.zcard(pool.keys.leases) == 2


async def test_poison_is_given_up_with_what_it_said(pool: Any, kit: Any) -> None:
    await pool.add(prompt="kills workers")
    for attempt in (1, 2, 3):
        entry, claimed = await pool.take(f"w{attempt}")
        assert claimed.attempt == attempt
        if attempt == 1:
            await pool.emit(kit.item(entry, claimed, [kit.delta(1, 'say "hi"/\n', [7, 8])]))
        await pool.expire_leases()
    _, claimed = await pool.take("w4")
    assert claimed.outcome == "exhausted"
    end = (await pool.log(claimed.job_id))[-1]
    assert (end.status, end.error["code"], end.usage) == ("failed", "poison", kit.usage(2))
    job = await pool.job(claimed.job_id)
    choice = json.loads(job["result"])["choices"][0]
    assert (choice["text"], choice["ids"]) == ('say "hi"/\n', [7, 8])
    ((_, copy),) = await pool.redis.xrange(pool.keys.dead)
    assert (copy[b"job"].decode(), copy[b"prompt"]) == (claimed.job_id, b"kills workers")
    await pool.assert_no_entries_left()


async def test_poison_ends_even_when_the_dead_letter_stream_is_unusable(pool: Any, kit: Any) -> None:
    await pool.redis.set(pool.keys.dead, "no stream")
    await pool.add()
    await pool.take(max_attempts=1)
    await pool.expire_leases()
    _, claimed = await pool.take(max_attempts=1)
    assert claimed.outcome == "exhausted"
    await pool.assert_no_entries_left()


async def test_deadline_past_before_the_claim(pool: Any, kit: Any) -> None:
    await pool.add(ttl_ms=1)
    _, claimed = await pool.take()
    assert claimed.outcome == "expired"
    (end,) = await pool.log(claimed.job_id)
    assert (end.seq, end.status, end.error["code"]) == (1, "failed", "deadline_exceeded")
    await pool.assert_no_entries_left()


async def test_undecodable_keeps_the_raw_entry(pool: Any, kit: Any) -> None:
    from headrace.errors import HeadraceError
    from headrace.messages import End
    from headrace.script_types import Final

    raw = {b"\xff\xfe": b"\x00\xff"}
    await pool.redis.xadd(pool.keys.queue("normal"), raw)
    entry, claimed = await pool.take()
    assert entry.fields == raw
    error = HeadraceError("invalid_request").to_wire()
    end = End(seq=1, status="failed", error=error)
    final = Final("failed", error=error, undecodable=True)
    assert await pool.emit(kit.item(entry, claimed, [end], final=final)) == ["ok"]
    ((_, copy),) = await pool.redis.xrange(pool.keys.undecodable)
    assert copy == raw
    await pool.assert_no_entries_left()

"""Who is served when: fair shares, classes, budgets; and what strangers can do to the queue."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

pytestmark = pytest.mark.redis


async def drain(pool: Any, n: int = 1) -> list[Any]:
    order = []
    while entries := await pool.pick(n):
        order += entries
    return order


def tenants(entries: list[Any]) -> list[str]:
    return [entry.fields[b"tenant"].decode() for entry in entries]


async def test_one_tenant_is_served_in_order_of_arrival(pool: Any) -> None:
    ids = [await pool.add(tenant="a", prompt="x" * random.Random(i).randrange(400)) for i in range(40)]
    assert [entry.entry_id for entry in await drain(pool, 3)] == ids


async def test_a_newcomer_waits_for_one_job_not_for_a_thousand(pool: Any) -> None:
    for _ in range(1000):
        await pool.add(tenant="a", prompt="x", max_tokens=10)
    for _ in range(100):
        await pool.pick(1)
    await pool.add(tenant="b", prompt="x", max_tokens=10)
    assert "b" in tenants(await pool.pick(2))


@pytest.mark.parametrize("seed", range(3))
async def test_backlogged_tenants_get_equal_tokens(pool: Any, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(300):
        await pool.add(tenant="long", prompt="x", max_tokens=dice.randrange(50, 400))
        await pool.add(tenant="short", prompt="x", max_tokens=dice.randrange(1, 50))
        await pool.add(tenant="heavy", prompt="x" * dice.randrange(2000), max_tokens=dice.randrange(1, 50))
    served: Counter[str] = Counter()
    largest = 0.0
    for _ in range(200):
        (entry,) = await pool.pick(1)
        size = len(entry.fields[b"prompt"]) / 4 + 4 * int(entry.fields[b"max_tokens"])
        largest = max(largest, size)
        served[entry.fields[b"tenant"].decode()] += size
        # Goyal, Vin, Cheng: two backlogged flows never differ by more than the sum of their largest packets
        least = min(served[tenant] for tenant in ("long", "short", "heavy"))
        assert max(served.values()) - least <= 2 * largest + 3


async def test_a_tenants_weight_multiplies_its_share(pool: Any) -> None:
    await pool.redis.hset(pool.keys.vtime, "w:big", 3)
    for _ in range(100):
        for tenant in ("big", "small"):
            await pool.add(tenant=tenant, prompt="x", max_tokens=10)
    counts = Counter(tenants(await pool.pick(80)))
    assert 58 <= counts["big"] <= 62


async def test_cancelled_jobs_are_not_charged(pool: Any) -> None:
    mine = [await pool.add(tenant="a", prompt="x", max_tokens=1000) for _ in range(50)]
    for _ in range(50):
        await pool.add(tenant="b", prompt="x", max_tokens=1000)
    await pool.pick(2)
    for entry_id in mine:
        await pool.scripts.cancel(f"normal-{entry_id}")
    await pool.add(tenant="a", prompt="again", max_tokens=1000)
    assert "a" in tenants(await pool.pick(3))


async def test_no_class_starves(pool: Any) -> None:
    for job_class in ("low", "normal", "high"):
        for _ in range(200):
            await pool.add(job_class, prompt="x", max_tokens=10)
    await pool.pick(0, sort_limit=200)
    counts = Counter(entry.job_class for entry in await pool.pick(210))
    assert 150 <= counts["high"] <= 170
    assert 35 <= counts["normal"] <= 45
    assert 8 <= counts["low"] <= 12


async def test_one_low_job_amid_a_flood_of_high_ones(pool: Any) -> None:
    await pool.add("low", prompt="x", max_tokens=10)
    served = []
    for _ in range(40):
        await pool.add("high", prompt="x", max_tokens=10)
        served += await pool.pick(1)
    assert "low" in [entry.job_class for entry in served]


@pytest.mark.parametrize("forged", ["1e308", "nan", "-5", "999999999999999999999", "0x7fffffff", "inf", ""])
async def test_forged_numbers_do_not_poison_the_clocks(pool: Any, forged: str) -> None:
    await pool.add(tenant="evil", prompt="x", max_tokens=forged, n=forged, ttl_ms=forged)
    await pool.add(tenant="evil", body='{"max_tokens": %s}' % (forged or "{"))
    await pool.add(tenant="good", prompt="x", max_tokens=10)
    assert len(await drain(pool)) == 3
    clocks = await pool.redis.hgetall(pool.keys.vtime)
    del clocks[b"seen"]  # a time, and not of a producer's making
    for value in clocks.values():
        assert 0 <= float(value) < 1e12
    await pool.add(tenant="good", prompt="x")
    await pool.add(tenant="evil", prompt="x")
    assert len(await drain(pool)) == 2


async def test_costs_are_found_in_bodies(pool: Any) -> None:
    import msgspec

    body = {"prompt": "x", "max_tokens": 300, "n": 2}
    await pool.add(tenant="json", body=msgspec.json.encode(body))
    await pool.add(tenant="pack", body=msgspec.msgpack.encode(body), ct="application/msgpack")
    await pool.add(tenant="flat", prompt="x" * 48, max_tokens=300, n=2)
    await pool.pick(0)
    clocks = {k: float(v) for k, v in (await pool.redis.hgetall(pool.keys.vtime)).items()}
    for tenant in (b"json", b"pack", b"flat"):
        assert 2400 < clocks[b"f:normal:" + tenant] < 2425


async def test_the_budget_bounds_a_pick(pool: Any) -> None:
    for _ in range(10):
        await pool.add(prompt="x" * 396, max_tokens=1000)  # 100 tokens and 64 in reserve
    assert len(await pool.pick(10, budget_tokens=0)) == 0
    assert len(await pool.pick(10, budget_tokens=1)) == 1
    assert len(await pool.pick(10, budget_tokens=400)) == 3


async def test_expired_leases_go_before_the_queue(pool: Any) -> None:
    first = await pool.add(prompt="old")
    await pool.pick(1, "w1")
    await pool.add("high", prompt="new")
    await pool.expire_leases()
    assert [entry.entry_id for entry in await pool.pick(1, "w2")] == [first]


async def test_what_pick_says_about_the_queue(pool: Any) -> None:
    ids = [await pool.add() for _ in range(5)]
    picked = await pool.scripts.pick("w", 2, budget_tokens=10_000, lease_ms=1000, sort_limit=4)
    assert picked.waiting == 3
    assert picked.last_ids == {"high": "0-0", "normal": ids[3], "low": "0-0"}
    reply = await pool.redis.xread({pool.keys.queue("normal"): picked.last_ids["normal"]}, count=1, block=1)
    assert reply[0][1][0][0].decode() == ids[4]


async def test_trimmed_entries_are_told_as_lost(pool: Any) -> None:
    entry_id = await pool.add()
    await pool.add(id="own", prompt="a")
    await pool.scripts.submit("normal", "submitted", {"prompt": "a"})
    await pool.pick(0)
    await pool.redis.xtrim(pool.keys.queue("normal"), maxlen=0, approximate=False)
    entries = await pool.pick(5)
    assert [entry.gone for entry in entries] == [True, True, True]
    assert {claimed.outcome for claimed in await pool.claim(entries)} == {"lost"}
    for job_id in (f"normal-{entry_id}", "own", "submitted"):
        (end,) = await pool.log(job_id)
        assert (end.status, end.error["code"]) == ("failed", "lost")
    assert (await pool.claim(entries))[0].outcome == "stale"
    await pool.assert_no_entries_left()


async def test_an_entry_deleted_while_it_runs(pool: Any, kit: Any) -> None:
    await pool.add(id="own", prompt="a")
    entry, claimed = await pool.take()
    await pool.redis.xdel(pool.keys.queue("normal"), entry.entry_id)
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(1), *kit.ending(2, 1)])) == ["ok"]
    await pool.assert_no_entries_left()


async def test_a_damaged_log_is_noticed_at_the_takeover(pool: Any, kit: Any) -> None:
    for damage in ("trimmed", "gone", "foreign"):
        await pool.add(id=damage, prompt="a")
        entry, claimed = await pool.take("w1")
        await pool.emit(kit.item(entry, claimed, [kit.delta(1), kit.delta(2)]))
        if damage == "trimmed":
            await pool.redis.xdel(pool.keys.log(damage), "2-0")
        elif damage == "gone":
            await pool.redis.delete(pool.keys.log(damage))
        else:
            await pool.redis.xadd(pool.keys.log(damage), {"x": "y"})
        await pool.expire_leases()
        _, again = await pool.take("w2")
        assert again.outcome == "lost"
        stored = await pool.redis.xrange(pool.keys.log(damage))
        assert stored[-1][1][b"type"] == b"end"
        assert int(stored[-1][0].split(b"-")[0]) >= 3
    await pool.assert_no_entries_left()


@pytest.mark.parametrize("far", ["18446744073709551615-18446744073709551615", "99999999999999-0"])
async def test_an_id_from_the_far_future_does_not_stop_the_queue(pool: Any, kit: Any, far: str) -> None:
    before = await pool.add(prompt="before")
    await pool.add(entry_id=far, prompt="far", ttl_ms=60_000)
    await pool.pick(0)
    after = await pool.add(prompt="after")
    assert int(after.split("-")[0]) < time.time() * 1000 + 10_000
    entries = await pool.pick(5)
    claims = await pool.claim(entries)
    assert [claimed.job_id for claimed in claims] == [f"normal-{before}", f"normal-{far}", f"normal-{after}"]
    assert 0 < claims[1].left_ms <= 60_000
    await pool.emit(*(kit.item(e, c, kit.ending(1)) for e, c in zip(entries, claims, strict=True)))
    await pool.assert_no_entries_left()


async def test_moving_an_id_back_takes_nothing_from_anybody(pool: Any, kit: Any) -> None:
    running = await pool.add(prompt="runs", max_tokens=3)
    entry, claimed = await pool.take("w1")
    waiting = await pool.add(prompt="waits")
    await pool.pick(0)
    queue = pool.keys.queue("normal")
    owners = {running: "w1", waiting: "ready"}
    await pool.add(entry_id="18446744073709551615-18446744073709551615", prompt="far")
    fields = await pool.redis.xrange(queue, count=2)
    await pool.pick(0)
    assert await pool.redis.xrange(queue, count=2) == fields
    pending = await pool.redis.xpending_range(queue, "workers", "-", "+", 10)
    held = {each["message_id"].decode(): each["consumer"].decode() for each in pending}
    assert owners.items() <= held.items()
    assert set(held.values()) == {"w1", "ready"}
    assert len(held) == 3
    await pool.emit(kit.item(entry, claimed, kit.ending(1)))
    entries = await pool.pick(5)
    claims = await pool.claim(entries)
    assert [each.outcome for each in claims] == ["run", "run"]
    await pool.emit(*(kit.item(e, c, kit.ending(1)) for e, c in zip(entries, claims, strict=True)))
    await pool.assert_no_entries_left()


async def test_times_that_producers_made_up(pool: Any) -> None:
    await pool.add(entry_id="5-1", prompt="a", ttl_ms=60_000)
    _, claimed = await pool.take()
    assert claimed.outcome == "run"
    assert 0 < claimed.left_ms <= 60_000
    assert claimed.waited_ms < 10_000


@pytest.mark.parametrize("broken", ["queue", "ready"])
async def test_one_class_with_a_foreign_key_leaves_the_others_alone(pool: Any, broken: str) -> None:
    key = getattr(pool.keys, broken)("normal")
    await pool.redis.set(key, "no such thing")
    await pool.add("high")
    await pool.add("low")
    picked = await pool.scripts.pick("w", 5, budget_tokens=10_000, lease_ms=1000)
    assert {entry.job_class for entry in picked.entries} == {"high", "low"}
    assert picked.unusable == [key]
    await pool.scripts.submit("high", "x", {"prompt": "a"})
    await pool.scripts.reap()
    await pool.redis.delete(key)
    await pool.add("normal")
    assert [entry.job_class for entry in await pool.pick(1, budget_tokens=1)] != []


async def test_a_foreign_key_in_place_of_a_job_waits_for_its_removal(pool: Any, kit: Any) -> None:
    await pool.redis.set(pool.keys.job("bad"), "no hash")
    await pool.add(id="bad", prompt="a")
    await pool.add(id="good", prompt="a")
    claims = await pool.claim(await pool.pick(2))
    assert [claimed.outcome for claimed in claims] == ["error", "run"]
    await pool.redis.delete(pool.keys.job("bad"))
    await pool.expire_leases()
    (_, claimed) = await pool.take()
    assert (claimed.job_id, claimed.outcome) == ("bad", "run")


async def test_clocks_of_another_type_cost_fairness_only(pool: Any) -> None:
    await pool.redis.set(pool.keys.vtime, "no hash")
    await pool.add()
    assert len(await pool.pick(1)) == 1


async def test_deleted_zsets_are_rebuilt_from_what_is_pending(pool: Any, kit: Any) -> None:
    for _ in range(5):
        await pool.add()
    entry, claimed = await pool.take()
    await pool.redis.delete(pool.keys.ready("normal"))
    assert await pool.pick(5) == []
    assert (await pool.scripts.reap()).restored == 4
    assert len(await pool.pick(9)) == 4
    await pool.redis.delete(pool.keys.leases)
    assert (await pool.scripts.reap()).restored == 5
    assert entry in await pool.pick(9, "w2")
    assert await pool.emit(kit.item(entry, claimed, [kit.delta(1)])) == ["ok"]


async def test_a_group_made_anew_does_not_run_anything_twice(pool: Any, kit: Any) -> None:
    for _ in range(3):
        await pool.add()
    entry, claimed = await pool.take()
    await pool.redis.xgroup_destroy(pool.keys.queue("normal"), "workers")
    assert len(await pool.pick(5, "w2")) == 2
    assert await pool.emit(kit.item(entry, claimed, kit.ending(1))) == ["ok"]


async def test_entries_of_other_shapes_are_handed_out_as_they_are(pool: Any) -> None:
    rows = [
        {b"\xff\xfe": b"\x00"},
        {b"id": b"a\0b", b"prompt": b"x"},
        {b"id": b"x" * 10_000},
        {b"body": b"["},
        {b"body": b"[" * 100_000},
        {b"": b""},
        {str(i).encode(): b"v" for i in range(5000)},
    ]
    for row in rows:
        await pool.redis.xadd(pool.keys.queue("normal"), row)
    entries = await pool.pick(10)
    assert [entry.fields for entry in entries] == rows
    items = [(entry.job_class, entry.entry_id, entry.member, None) for entry in entries]
    for outcome in ("run", "exhausted"):
        claims = await pool.scripts.claim("w1", items, lease_ms=1, max_attempts=1)
        assert [claimed.outcome for claimed in claims] == [outcome] * len(rows)
    await pool.assert_no_entries_left()


async def test_a_hundred_thousand_waiting(pool: Any) -> None:
    fill = """for i = 1, 25000 do
        redis.call('XADD', KEYS[1], '*', 'prompt', 'x', 'tenant', 't' .. i % 50, 'max_tokens', 10)
    end"""
    for _ in range(4):
        await pool.redis.eval(fill, 1, pool.keys.queue("normal"))
    for _ in range(50):
        picked = await pool.scripts.pick("w", 0, budget_tokens=0, lease_ms=1000, sort_limit=2000)
    assert picked.waiting == 100_000
    await pool.redis.config_resetstat()
    for _ in range(100):
        assert len(await pool.pick(8)) == 8
    stats = (await pool.redis.info("commandstats"))["cmdstat_evalsha"]
    assert stats["usec_per_call"] < 5000, stats

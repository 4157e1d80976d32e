"""Webhooks from a job's end to an endpoint, over real Redis, arq and sockets."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from gateway.tasks.deliveries import MAX_BODY_BYTES, Deliveries
from gateway.tasks.signing import tenant_secrets
from headrace.keys import TASK_QUEUE, WEBHOOK_QUEUE

pytestmark = pytest.mark.redis


def deliveries(db: Any) -> Deliveries:
    return Deliveries(db, "smollm2", retention_ms=60_000)


async def settled(db: Any, kit: Any, count: int = 1, tenant: str = "default") -> list[Any]:
    async def look() -> Any:
        found = await deliveries(db).listed(tenant, None, 100)
        return found if len(found) >= count and all(d.status != "pending" for d in found) else None

    return await kit.eventually(look)


async def test_a_signed_event_is_delivered_once(
    db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any
) -> None:
    await start_tasks()
    await jobs.finish("j1", endpoint.url, tenant="acme")
    (received,) = await endpoint.wait_for(1)
    (secret,) = await tenant_secrets(db, "acme")
    event = Webhook(secret).verify(received.body, received.headers)
    assert event["type"] == "job.done"
    assert (event["data"]["id"], event["data"]["status"], event["data"]["tenant"]) == ("j1", "done", "acme")
    assert event["data"]["result"]["choices"][0]["text"] == "hello"
    (record,) = await settled(db, kit, tenant="acme")
    assert (record.status, record.attempts, record.history[0].code) == ("delivered", 1, 200)
    assert record.id == received.headers["webhook-id"]
    assert await db.xlen(jobs.keys.hooks) == 0
    assert not await db.zcard(jobs.keys.due)
    assert len(endpoint.received) == 1


async def test_tenants_have_secrets_of_their_own_and_an_old_one_still_signs(db: Any) -> None:
    first, again, other = [await tenant_secrets(db, name) for name in ("a", "a", "b")]
    assert first == again != other
    await db.lpush("hr:webhook-secrets", "new")
    newest, older = await tenant_secrets(db, "a")
    assert older == first[0] != newest


async def test_500s_are_tried_again_with_the_same_id(
    db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any
) -> None:
    endpoint.replies = [kit.status(500), kit.status(503), kit.status(429)]
    await start_tasks()
    await jobs.finish("j1", endpoint.url)
    received = await endpoint.wait_for(4)
    assert len({each.headers["webhook-id"] for each in received}) == 1
    assert len({each.body for each in received}) == 1
    (record,) = await settled(db, kit)
    assert [attempt.code for attempt in record.history] == [500, 503, 429, 200]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (400, "refused"),
        (404, "refused"),
        (410, "refused"),
        (302, "redirect"),
        (308, "redirect"),
    ],
)
async def test_what_is_final_is_not_tried_again(
    db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any, reply: int, error: str
) -> None:
    endpoint.replies = [kit.status(reply, f"location: {endpoint.url}/elsewhere")]
    await start_tasks()
    await jobs.finish("j1", endpoint.url)
    (record,) = await settled(db, kit)
    assert (record.status, record.attempts) == ("failed", 1)
    assert (record.history[0].code, record.history[0].error) == (reply, error)
    assert [each.path for each in endpoint.received] == ["/hook"]


async def test_attempts_end(db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any) -> None:
    endpoint.replies = [kit.status(500)] * 10
    await start_tasks(webhook_attempts=3)
    await jobs.finish("j1", endpoint.url)
    (record,) = await settled(db, kit)
    assert (record.status, record.attempts, len(endpoint.received)) == ("failed", 3, 3)


async def test_large_replies_and_replies_cut_short_count_by_their_status(
    db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any
) -> None:
    cut = b"HTTP/1.1 200 x\r\ncontent-length: 1000\r\n\r\nhalf"
    endpoint.replies = [kit.status(200, body=b"x" * 10_000_000), cut, b"nonsense\r\n\r\n", kit.status(200)]
    await start_tasks()
    await jobs.finish("large", endpoint.url)
    await endpoint.wait_for(1)
    await jobs.finish("cut", endpoint.url)
    await endpoint.wait_for(2)
    await jobs.finish("nonsense", endpoint.url)
    by_job = {record.job: record for record in await settled(db, kit, 3)}
    assert (by_job["large"].attempts, by_job["cut"].attempts) == (1, 1)
    assert [a.error for a in by_job["nonsense"].history] == ["not_http", None]


@pytest.mark.alone  # by the clock
async def test_an_endpoint_that_hangs_holds_nobody_up(
    db: Any, jobs: Any, endpoints: Any, start_tasks: Any, kit: Any
) -> None:
    hanging, well = await endpoints(), await endpoints()
    hanging.replies = [None] * 100
    await start_tasks(webhook_timeout_s=8.0, webhook_host_limit=2)
    for number in range(70):
        await jobs.finish(f"hangs-{number}", hanging.url)
    await hanging.wait_for(2)
    began_s = time.monotonic()
    for number in range(5):
        await jobs.finish(f"well-{number}", well.url)
    await well.wait_for(5)
    assert time.monotonic() - began_s < 4
    assert len(hanging.received) == 2


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://localhost:1/", "http://[::ffff:10.0.0.1]/", "http://0x7f.1/"]
)
async def test_private_addresses_are_refused_once(
    db: Any, jobs: Any, start_tasks: Any, kit: Any, url: str
) -> None:
    await start_tasks(webhook_networks=())
    await jobs.finish("j1", url)
    (record,) = await settled(db, kit)
    assert (record.status, record.attempts) == ("failed", 1)
    assert record.history[0].error == "forbidden_address"


async def test_a_large_result_is_left_out(db: Any, jobs: Any, endpoint: Any, start_tasks: Any) -> None:
    await start_tasks()
    await jobs.finish("j1", endpoint.url, text="x" * MAX_BODY_BYTES)
    (received,) = await endpoint.wait_for(1)
    event = json.loads(received.body)
    assert event["truncated"] is True
    assert "result" not in event["data"]
    assert event["data"]["status"] == "done"


async def test_replay_sends_the_same_again(
    db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any
) -> None:
    endpoint.replies = [kit.status(404)]
    await start_tasks()
    await jobs.finish("j1", endpoint.url)
    (failed,) = await settled(db, kit)
    assert failed.status == "failed"
    assert await deliveries(db).replay(failed.id)
    first, second = await endpoint.wait_for(2)
    assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)
    (record,) = await settled(db, kit)
    assert (record.status, record.replays, len(record.history)) == ("delivered", 1, 2)
    assert not await deliveries(db).replay("msg_unknown")


async def test_two_processes_share_the_work(
    db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any
) -> None:
    await start_tasks()
    await start_tasks()
    for number in range(30):
        await jobs.finish(f"j{number}", endpoint.url)
    await settled(db, kit, 30)
    assert len(endpoint.received) == len({each.headers["webhook-id"] for each in endpoint.received}) == 30


async def test_pickles_are_not_read(
    db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any, tmp_path: Path
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "touched"),)

    for queue in (WEBHOOK_QUEUE, TASK_QUEUE):
        await db.set("arq:job:" + queue, pickle.dumps(Evil()))
        await db.zadd(queue, {queue: 1})
    await start_tasks()
    await jobs.finish("j1", endpoint.url)
    await endpoint.wait_for(1)

    async def both_are_gone() -> bool:
        return not await db.exists("arq:job:" + TASK_QUEUE, "arq:job:" + WEBHOOK_QUEUE)

    await kit.eventually(both_are_gone)
    assert not (tmp_path / "touched").exists()


async def test_every_key_expires(db: Any, jobs: Any, endpoint: Any, start_tasks: Any, kit: Any) -> None:
    await start_tasks()
    await jobs.finish("j1", endpoint.url)
    await settled(db, kit)
    configuration = {b"hr:webhook-secrets", jobs.keys.vtime.encode(), jobs.keys.queue("normal").encode()}

    async def lasting() -> set[bytes]:
        keys = set(await db.keys("*")) - configuration
        return {key for key in keys if await db.pttl(key) == -1}  # neither a TTL nor gone by now

    async def none_lasts() -> bool:  # arq's queue is there while a sweep waits in it
        return not await lasting()

    await kit.eventually(none_lasts)

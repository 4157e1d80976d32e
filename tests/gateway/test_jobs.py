"""/v1/jobs: submit once, poll, wait, follow, resume on another gateway, cancel."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent, aconnect_sse

pytestmark = pytest.mark.redis


@dataclass(frozen=True)
class Event:
    id: str
    event: str
    data: str

    def json(self) -> Any:
        return json.loads(self.data)


def read(event: ServerSentEvent) -> Event:
    return Event(event.id, event.event, event.data)


async def events_of(client: httpx.AsyncClient, job_id: str, **options: Any) -> list[Event]:
    async with aconnect_sse(client, "GET", f"/v1/jobs/{job_id}/events", **options) as source:
        assert source.response.status_code == 200
        return [read(event) async for event in source.aiter_sse()]


async def submit(client: httpx.AsyncClient, **body: Any) -> str:
    answer = await client.post("/v1/jobs", json={"prompt": "hi", "max_tokens": 3, **body})
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    assert answer.headers["location"] == f"/v1/jobs/{job_id}"
    return str(job_id)


async def test_a_job_from_submission_to_result(http: httpx.AsyncClient, worker: Any, kit: Any) -> None:
    job_id = await submit(http, meta={"k": 1}, **{"class": "low"})
    assert job_id.startswith("job_")
    done = (await http.get(f"/v1/jobs/{job_id}", params={"wait": 10})).json()
    assert (done["status"], done["object"], done["pool"], done["class"]) == ("done", "job", "smollm2", "low")
    assert done["result"]["choices"][0]["text"] == kit.text_of(0, 3)
    assert done["usage"]["completion_tokens"] == 3
    assert done["t_submit"] <= done["t_start"] <= done["t_first"] <= done["t_end"]


async def test_a_waiting_job_is_queued_and_a_long_poll_ends_in_time(http: httpx.AsyncClient) -> None:
    job_id = await submit(http)
    started_s = asyncio.get_running_loop().time()
    answer = await http.get(f"/v1/jobs/{job_id}", params={"wait": 0.3})
    assert answer.json()["status"] == "queued"
    assert 0.3 <= asyncio.get_running_loop().time() - started_s < 2


async def test_events_carry_their_seq(http: httpx.AsyncClient, worker: Any, kit: Any) -> None:
    job_id = await submit(http)
    events = await events_of(http, job_id)
    assert [event.id for event in events] == ["1", "2", "3", "4", "5"]
    assert [event.event for event in events] == ["delta"] * 3 + ["finish", "end"]
    assert "".join(event.json()["text"] for event in events[:3]) == kit.text_of(0, 3)
    assert events[-1].json()["status"] == "done"
    assert await events_of(http, job_id) == events


async def test_resume_on_another_gateway(start_gateway: Any, http: Any, worker: Any, kit: Any) -> None:
    job_id = await submit(http, max_tokens=6)
    first: list[Event] = []
    async with aconnect_sse(http, "GET", f"/v1/jobs/{job_id}/events") as source:
        async for event in source.aiter_sse():
            first.append(read(event))
            if len(first) == 2:
                break
    other = await start_gateway()
    async with httpx.AsyncClient(base_url=other.url, timeout=20) as client:
        rest = await events_of(client, job_id, headers={"Last-Event-ID": first[-1].id})
        assert await events_of(client, job_id, params={"after": "2"}) == rest
    assert [int(event.id) for event in first + rest] == list(range(1, 9))


async def test_after_the_last_event_a_reader_that_reconnects_is_told_to_stop(http: Any, worker: Any) -> None:
    job_id = await submit(http)
    last = (await events_of(http, job_id))[-1]
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": last.id})
    assert answer.status_code == 204
    assert await events_of(http, job_id, params={"after": last.id}) == []


async def test_an_empty_last_event_id_is_none(http: httpx.AsyncClient, worker: Any) -> None:
    job_id = await submit(http)
    assert len(await events_of(http, job_id, headers={"Last-Event-ID": ""})) == 5


async def test_three_readers_at_once(http: httpx.AsyncClient, worker: Any) -> None:
    worker.step_s = 0.005
    job_id = await submit(http, max_tokens=20)
    first, second, third = await asyncio.gather(*(events_of(http, job_id) for _ in range(3)))
    assert len(first) == 22
    assert first == second == third


@pytest.mark.parametrize("value", ["99", "-1", "x", "1.0", "9" * 30, "١"])
async def test_a_place_that_is_not_in_the_log(http: httpx.AsyncClient, worker: Any, value: str) -> None:
    job_id = await submit(http)
    await http.get(f"/v1/jobs/{job_id}", params={"wait": 10})
    headers = {"Last-Event-ID": value.encode()}
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    answer = await http.get(f"/v1/jobs/{job_id}/events", params={"after": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_id(http: httpx.AsyncClient, method: str) -> None:
    for path in ("/v1/jobs/job_0", "/v1/jobs/normal-5-0", "/v1/jobs/job_0/events"):
        if method == "GET" or not path.endswith("events"):
            answer = await http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_an_expired_job_is_unknown(http: httpx.AsyncClient, worker: Any, db: Any, kit: Any) -> None:
    job_id = await submit(http)
    await events_of(http, job_id)
    keys = worker.keys
    await db.delete(keys.job(job_id), keys.log(job_id))
    assert (await http.get(f"/v1/jobs/{job_id}/events")).status_code == 404


async def test_a_producers_own_entry_can_be_followed(
    http: httpx.AsyncClient, db: Any, worker: Any, kit: Any
) -> None:
    entry_id = await db.xadd(worker.keys.queue("high"), {"prompt": "x", "max_tokens": "2"})
    job_id = f"high-{entry_id.decode()}"
    assert len(await events_of(http, job_id)) == 4
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["status"] == "done"


async def test_a_producers_own_entry_is_found_before_any_worker(
    http: httpx.AsyncClient, db: Any, kit: Any
) -> None:
    entry_id = await db.xadd(kit.Keys(kit.POOL).queue("normal"), {"prompt": "x"})
    answer = await http.get(f"/v1/jobs/normal-{entry_id.decode()}")
    assert answer.json()["status"] == "queued"


async def test_idempotency(http: httpx.AsyncClient, worker: Any) -> None:
    body = {"prompt": "once", "max_tokens": 2}
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(*(http.post("/v1/jobs", json=body, headers=headers) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {202}
    (job_id,) = {answer.json()["id"] for answer in answers}
    await http.get(f"/v1/jobs/{job_id}", params={"wait": 10})
    assert [job.id for job in worker.seen] == [job_id]
    other = await http.post("/v1/jobs", json={**body, "max_tokens": 3}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")


async def test_a_producers_own_id(http: httpx.AsyncClient, worker: Any) -> None:
    assert await submit(http, id="mine") == "mine"
    assert await submit(http, id="mine") == "mine"
    answer = await http.post("/v1/jobs", json={"prompt": "other", "id": "mine"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "id")


async def test_a_whole_openai_body(http: httpx.AsyncClient, worker: Any) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "stream": True,
    }
    answer = await http.post("/v1/jobs", json={"body": body, "max_tokens": 2})
    await http.get(answer.headers["location"], params={"wait": 10})
    (job,) = worker.seen
    assert (job.messages, job.params.max_tokens) == (body["messages"], 2)


async def test_cancel_a_waiting_job(http: httpx.AsyncClient) -> None:
    job_id = await submit(http)
    answer = await http.delete(f"/v1/jobs/{job_id}")
    assert answer.status_code in (200, 202)
    events = await events_of(http, job_id) if answer.json()["status"] == "cancelled" else []
    assert [event.json().get("status") for event in events] in ([], ["cancelled"])


async def test_cancel_a_running_job_from_another_gateway(start_gateway: Any, http: Any, worker: Any) -> None:
    worker.step_s = 0.005
    job_id = await submit(http, max_tokens=100_000)
    other = await start_gateway()
    async with httpx.AsyncClient(base_url=other.url, timeout=20) as client:
        answer = await client.delete(f"/v1/jobs/{job_id}")
        assert answer.status_code in (200, 202)
    done = (await http.get(f"/v1/jobs/{job_id}", params={"wait": 10})).json()
    assert done["status"] == "cancelled"
    again = await http.delete(f"/v1/jobs/{job_id}")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_a_deadline_is_kept_without_any_worker(http: httpx.AsyncClient) -> None:
    job_id = await submit(http, ttl_ms=300)
    events = await events_of(http, job_id)
    assert [event.json()["error"]["code"] for event in events] == ["deadline_exceeded"]
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["status"] == "failed"

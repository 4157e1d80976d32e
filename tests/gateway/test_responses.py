"""The Responses API over HTTP, with a scripted worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from gateway.responses.records import Records
from gateway.responses.render import EventWriter
from gateway.responses.schema import ResponseBody
from headrace.messages import Delta, End, Finish, Usage

pytestmark = pytest.mark.redis


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "input": "hi", "max_output_tokens": 3, **fields}


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


async def stream(http: httpx.AsyncClient, method: str, url: str, **options: Any) -> list[dict[str, Any]]:
    async with http.stream(method, url, **options) as response:
        assert response.status_code == 200
        return [event async for event in events_of(response)]


@pytest.fixture
async def client(gateway: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as found:
        yield found


async def test_an_answer(client: openai.AsyncOpenAI, worker: Any, kit: Any) -> None:
    response = await client.responses.create(**body(instructions="be brief", metadata={"a": "b"}))
    assert (response.status, response.output_text) == ("incomplete", kit.text_of(0, 3))
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (3, 3)
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert (response.instructions, response.metadata) == ("be brief", {"a": "b"})
    (job,) = worker.seen
    assert job.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    again = await client.responses.retrieve(response.id)
    assert (again.output_text, again.status, again.usage) == (
        response.output_text, "incomplete", response.usage,
    )  # fmt: skip


async def test_the_events_of_a_stream(client: openai.AsyncOpenAI, worker: Any, kit: Any) -> None:
    events = [event async for event in await client.responses.create(**body(), stream=True)]
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * 3, "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert deltas == final.output_text == kit.text_of(0, 3)
    stored = await client.responses.retrieve(final.id)
    assert stored.to_dict() == {**final.to_dict(), "completed_at": stored.completed_at}


async def test_a_context_goes_on(client: openai.AsyncOpenAI, worker: Any, kit: Any) -> None:
    first = await client.responses.create(**body(instructions="only here"))
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "and"}]}]
    second = await client.responses.create(**body(input=parts, previous_response_id=first.id))
    third = await client.responses.create(**body(input="then", previous_response_id=second.id))
    said = kit.text_of(0, 3)
    assert worker.seen[-1].messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "then"},
    ]
    assert third.previous_response_id == second.id
    items = await client.responses.input_items.list(third.id)
    assert [item.content[0].text for item in items.data] == ["then"]  # type: ignore[index]


async def test_background_is_answered_at_once_and_resumed_anywhere(
    start_gateway: Any, http: httpx.AsyncClient, worker: Any, kit: Any
) -> None:
    worker.gate.clear()
    created = (await http.post("/v1/responses", json=body(background=True))).json()
    assert (created["status"], created["output"]) == ("queued", [])
    path = f"/v1/responses/{created['id']}"

    async def running() -> bool:
        return (await http.get(path)).json()["status"] == "in_progress"

    await kit.eventually(running)
    whole = asyncio.create_task(stream(http, "GET", path, params={"stream": "true"}))
    worker.gate.set()
    events = await whole
    assert [event["type"] for event in events[:3]] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    other = await start_gateway()
    async with httpx.AsyncClient(base_url=other.url, timeout=20) as elsewhere:
        for after in range(-1, len(events)):
            params = {"stream": "true", "starting_after": after}
            assert await stream(elsewhere, "GET", path, params=params) == events[after + 1 :]
        assert (await elsewhere.get(path)).json()["status"] == "incomplete"


async def test_a_place_behind_the_last_event(http: httpx.AsyncClient, worker: Any) -> None:
    response_id = (await http.post("/v1/responses", json=body())).json()["id"]
    path = f"/v1/responses/{response_id}"
    last = (await stream(http, "GET", path, params={"stream": True}))[-1]["sequence_number"]
    assert await stream(http, "GET", path, params={"stream": True, "starting_after": last}) == []
    (told,) = await stream(http, "GET", path, params={"stream": True, "starting_after": last + 1})
    assert (told["type"], told["code"], told["param"]) == ("error", "invalid_request", "starting_after")
    assert str(last) in told["message"]


async def test_cancel_keeps_what_was_said(http: httpx.AsyncClient, worker: Any, kit: Any) -> None:
    worker.step_s = 0.05
    created = (await http.post("/v1/responses", json=body(background=True, max_output_tokens=999))).json()
    path = f"/v1/responses/{created['id']}"
    async with http.stream("GET", path, params={"stream": "true"}) as response:
        async for event in events_of(response):
            if event["type"] == "response.output_text.delta":
                break
    cancelled = (await http.post(f"{path}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert (await http.post(f"{path}/cancel")).json() == cancelled
    assert (await http.get(path)).json() == cancelled
    last = (await stream(http, "GET", path, params={"stream": "true"}))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    waiting = (await http.post("/v1/responses", json=body())).json()
    refused = await http.post(f"/v1/responses/{waiting['id']}/cancel")
    assert refused.status_code == 400


async def test_a_stored_answer_outlives_its_job(
    http: httpx.AsyncClient, db: Any, worker: Any, kit: Any
) -> None:
    created = (await http.post("/v1/responses", json=body(background=True))).json()

    async def ended() -> bool:
        return await db.hget(worker.keys.job(created["id"]), "status") == b"done"

    await kit.eventually(ended)
    assert await Records(db).settle_ended("smollm2", 2**50) == 1
    assert await db.zcard(worker.keys.open_responses) == 0
    await db.delete(worker.keys.job(created["id"]), worker.keys.log(created["id"]))
    path = f"/v1/responses/{created['id']}"
    kept = (await http.get(path)).json()
    assert kept["output"][0]["content"][0]["text"] == kit.text_of(0, 3)
    (event,) = await stream(http, "GET", path, params={"stream": "true", "starting_after": 4})
    assert (event["sequence_number"], event["response"]) == (5, kept)
    again = await http.post("/v1/responses", json=body(previous_response_id=created["id"]))
    assert again.status_code == 200


async def test_a_job_that_was_lost_is_told(http: httpx.AsyncClient, db: Any, worker: Any, kit: Any) -> None:
    worker.gate.clear()
    created = (await http.post("/v1/responses", json=body(background=True))).json()

    async def claimed() -> bool:
        return len(worker.running) == 1

    await kit.eventually(claimed)
    await db.delete(worker.keys.job(created["id"]), worker.keys.log(created["id"]))
    (event,) = await stream(http, "GET", f"/v1/responses/{created['id']}", params={"stream": "true"})
    assert (event["type"], event["response"]["error"]["code"]) == ("response.failed", "lost")


async def test_failures(http: httpx.AsyncClient, worker: Any) -> None:
    failed = await http.post("/v1/responses", json=body(input="fail context_length_exceeded"))
    assert (failed.status_code, failed.json()["error"]["code"]) == (400, "context_length_exceeded")
    events = await stream(http, "POST", "/v1/responses", json=body(input="fail non_finite", stream=True))
    assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == ("response.failed", "non_finite")
    response = (await http.get(f"/v1/responses/{events[-1]['response']['id']}")).json()
    assert response["status"] == "failed"
    answer = await http.post("/v1/responses", json=body(previous_response_id=response["id"]))
    assert answer.json()["error"]["param"] == "previous_response_id"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
    ({"background": True, "store": False}, "store"),
    ({"metadata": {str(k): "" for k in range(17)}}, "metadata"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
]


async def test_refusals_name_the_field(http: httpx.AsyncClient, worker: Any) -> None:
    for fields, param in REFUSED:
        response = await http.post("/v1/responses", json=body(**fields))
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == param, fields


async def test_log_probabilities(http: httpx.AsyncClient, worker: Any) -> None:
    wanted = body(include=["message.output_text.logprobs"], top_logprobs=2)
    answer = (await http.post("/v1/responses", json=wanted)).json()
    tokens = answer["output"][0]["content"][0]["logprobs"]
    assert [len(token["top_logprobs"]) for token in tokens] == [2, 2, 2]
    events = await stream(http, "POST", "/v1/responses", json={**wanted, "stream": True})
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [token for event in deltas for token in event["logprobs"]] == tokens


async def test_what_is_not_stored_leaves_nothing(http: httpx.AsyncClient, db: Any, worker: Any) -> None:
    answer = (await http.post("/v1/responses", json=body(store=False))).json()
    assert not await db.keys("*response*")
    assert (await http.get(f"/v1/responses/{answer['id']}")).status_code == 404


async def test_delete_forgets_and_stops(http: httpx.AsyncClient, db: Any, worker: Any, kit: Any) -> None:
    worker.gate.clear()
    created = (await http.post("/v1/responses", json=body(background=True))).json()
    path = f"/v1/responses/{created['id']}"
    assert (await http.delete(path)).json() == {"id": created["id"], "object": "response", "deleted": True}
    assert (await http.get(path)).status_code == 404
    assert (await http.delete(path)).status_code == 404
    assert await db.hget(worker.keys.job(created["id"]), "cancel") == b"1"


async def test_a_client_that_leaves_ends_it_unless_in_the_background(
    http: httpx.AsyncClient, db: Any, worker: Any, kit: Any
) -> None:
    worker.step_s = 0.02
    ids = []
    for background in (False, True):
        wanted = body(stream=True, background=background, max_output_tokens=50)
        async with http.stream("POST", "/v1/responses", json=wanted) as response:
            async for event in events_of(response):
                if event["type"] == "response.output_text.delta":
                    break
            ids.append(response.headers["x-headrace-jobs"])

    async def both_ended() -> Any:
        found = [(await http.get(f"/v1/responses/{i}")).json()["status"] for i in ids]
        return found if "in_progress" not in found else None

    assert await kit.eventually(both_ended) == ["cancelled", "incomplete"]


async def test_tenants_see_their_own(start_gateway: Any, worker: Any) -> None:
    gateway = await start_gateway(api_keys=("a:key-a", "b:key-b"))
    mine, theirs = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        created = (await http.post("/v1/responses", json=body(), headers=mine)).json()
        path = f"/v1/responses/{created['id']}"
        assert (await http.get(path, headers=mine)).status_code == 200
        assert (await http.get(path, headers=theirs)).status_code == 404
        wanted = body(previous_response_id=created["id"])
        refused = await http.post("/v1/responses", json=wanted, headers=theirs)
        assert refused.json()["error"]["code"] == "previous_response_not_found"


async def test_the_official_clients_helpers(client: openai.AsyncOpenAI, worker: Any, kit: Any) -> None:
    async with client.responses.stream(model="smollm2", input="hi", max_output_tokens=3) as events:
        seen = [event async for event in events]
    kinds = [event.type for event in seen]
    assert seen[-1].type == "response.incomplete"
    final = seen[-1].response
    assert final.output_text == kit.text_of(0, 3)
    resumed = await client.responses.retrieve(final.id, stream=True, starting_after=4)
    assert [event.sequence_number async for event in resumed] == list(range(5, len(kinds)))
    worker.gate.clear()
    waiting = await client.responses.create(model="smollm2", input="hi", background=True)
    cancelling = asyncio.create_task(client.responses.cancel(waiting.id))

    async def flagged() -> bool:
        return await worker.redis.hget(worker.keys.job(waiting.id), "cancel") == b"1"

    await kit.eventually(flagged)
    worker.gate.set()
    assert (await cancelling).status == "cancelled"
    await client.responses.delete(waiting.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(waiting.id)


def test_an_answer_that_came_to_its_end_is_completed() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    writer = EventWriter(ResponseBody(id="resp_1", created_at=1, model="m"))
    chunks = [
        *writer.opening(),
        *writer.event(Delta(seq=1, text="", ids=[1])),
        *writer.event(Delta(seq=2, text="hi", ids=[2])),
        *writer.event(Finish(seq=3, reason="stop")),
        *writer.event(End(seq=4, status="done", usage=usage)),
    ]
    events = [json.loads(chunk.split(b"data: ")[1]) for chunk in chunks]
    assert [event["delta"] for event in events if "delta" in event] == ["hi"]
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")
    assert last["response"]["output"][0]["status"] == "completed"
    assert last["response"]["usage"]["total_tokens"] == 3


def test_a_response_cancelled_before_it_began_has_no_output() -> None:
    writer = EventWriter(ResponseBody(id="resp_1", created_at=1, model="m", background=True))
    chunks = [*writer.opening(), *writer.event(End(seq=1, status="cancelled"))]
    events = [json.loads(chunk.split(b"data: ")[1]) for chunk in chunks]
    assert [event["type"] for event in events] == [
        "response.created", "response.queued", "response.incomplete",
    ]  # fmt: skip
    assert (events[-1]["response"]["status"], events[-1]["response"]["output"]) == ("cancelled", [])

"""Batches from upload to output file: the gateway, the tasks process and a scripted worker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import httpx
import openai
import pytest

from gateway.tasks.service import Tasks
from headrace.config import TasksSettings

pytestmark = pytest.mark.redis
CHAT: Final = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def request_of(number: int, endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == CHAT else {"prompt": "hi"}
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": endpoint,
        "body": {"model": "smollm2", "max_tokens": 2, **asked, **body},
    }


def jsonl(requests: list[Any]) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in requests)


async def start(http: httpx.AsyncClient, requests: list[Any], endpoint: str = CHAT) -> dict[str, Any]:
    files = {"file": ("in.jsonl", jsonl(requests))}
    uploaded = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    wanted = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
    response = await http.post("/v1/batches", json=wanted)
    assert response.status_code == 200, response.text
    return response.json()


async def ended(http: httpx.AsyncClient, batch_id: str, kit: Any) -> dict[str, Any]:
    async def look() -> Any:
        batch = (await http.get(f"/v1/batches/{batch_id}")).json()
        return batch if batch["status"] in ENDED else None

    return await kit.eventually(look, 30)


async def lines(http: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    content = await http.get(f"/v1/files/{file_id}/content")
    assert content.status_code == 200
    return [json.loads(line) for line in content.text.splitlines()]


@pytest.fixture
async def start_tasks(redis_url: str) -> AsyncIterator[Callable[..., Awaitable[asyncio.Task[None]]]]:
    running: list[tuple[Tasks, asyncio.Task[None]]] = []

    async def run(**changes: Any) -> asyncio.Task[None]:
        tasks = Tasks(TasksSettings(redis_url=redis_url, **{"drain_timeout_s": 0.1, **changes}))
        running.append((tasks, asyncio.create_task(tasks.run())))
        return running[-1][1]

    yield run
    for tasks, task in running:
        tasks.stop()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_batch_with_the_official_client(
    gateway: Any, db: Any, worker: Any, kit: Any, start_tasks: Any
) -> None:
    await start_tasks()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        content = jsonl([request_of(1), request_of(2, n=2), request_of(3, logprobs=True)])
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        assert batch.status == "validating"

        async def done() -> Any:
            found = await client.batches.retrieve(batch.id)
            return found if found.status in ENDED else None

        batch = await kit.eventually(done, 30)
        assert (batch.status, batch.metadata, batch.error_file_id) == ("completed", {"a": "b"}, None)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        assert batch.output_file_id is not None
        text = (await client.files.content(batch.output_file_id)).text
        found = {line["custom_id"]: line for line in map(json.loads, text.splitlines())}
        assert set(found) == {"r1", "r2", "r3"}
        body = found["r1"]["response"]["body"]
        assert (body["object"], body["choices"][0]["message"]["content"]) == (
            "chat.completion", kit.text_of(0, 2),
        )  # fmt: skip
        assert len(found["r2"]["response"]["body"]["choices"]) == 2
        assert found["r3"]["response"]["body"]["choices"][0]["logprobs"]
        assert [found.id async for found in client.batches.list()] == [batch.id]
    assert {job.job_class for job in worker.seen} == {"low"}
    assert not await db.zcard("hr:{files}:due")
    for key in await db.keys("hr:{files}*"):
        assert await db.pttl(key) > 0, key


async def test_failures_go_to_the_error_file(
    http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any
) -> None:
    await start_tasks()
    fails = request_of(2)
    fails["body"]["messages"][0]["content"] = "fail context_length_exceeded"
    batch = await start(http, [request_of(1), fails, request_of(3, tools=[{}]), request_of(4, model="other")])
    batch = await ended(http, batch["id"], kit)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    errors = {line["custom_id"]: line["response"] for line in await lines(http, batch["error_file_id"])}
    codes = {name: (r["status_code"], r["body"]["error"]["code"]) for name, r in errors.items()}
    assert codes == {
        "r2": (400, "context_length_exceeded"),
        "r3": (400, "invalid_request"),
        "r4": (404, "unknown_model"),
    }
    assert [line["custom_id"] for line in await lines(http, batch["output_file_id"])] == ["r1"]


async def test_completions(http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any) -> None:
    await start_tasks()
    url = "/v1/completions"
    batch = await start(http, [request_of(1, url), request_of(2, url, prompt=["a", "b"])], url)
    batch = await ended(http, batch["id"], kit)
    (line,) = await lines(http, batch["output_file_id"])
    assert line["response"]["body"]["choices"][0]["text"] == kit.text_of(0, 2)
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


async def test_a_file_written_on_windows(
    http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any
) -> None:
    await start_tasks()
    raw = [json.dumps(request_of(number)).encode() + b"\r" for number in range(2)]
    batch = await ended(http, (await start(http, [b"\xef\xbb\xbf" + raw[0], raw[1], b"\r"]))["id"], kit)
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_line_may_have_a_webhook(
    http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any
) -> None:
    await start_tasks()
    url = "http://127.0.0.1:1/hook"  # refused where it is to be sent: not a public address
    batch = await start(http, [request_of(1, webhook=url), request_of(2), request_of(3, webhook="x")])
    batch = await ended(http, batch["id"], kit)
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert sorted(job.webhook or "" for job in worker.seen) == ["", url]


async def test_responses(http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any) -> None:
    await start_tasks()
    url = "/v1/responses"
    bodies: list[dict[str, Any]] = [
        {"input": "hi", "instructions": "be brief", "max_output_tokens": 2},
        {"input": "hi", "background": True},
        {"input": "hi", "previous_response_id": "resp_1"},
    ]
    asked = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": {"model": "smollm2", **body}}
        for number, body in enumerate(bodies)
    ]
    batch = await ended(http, (await start(http, asked, url))["id"], kit)
    (line,) = await lines(http, batch["output_file_id"])
    body = line["response"]["body"]
    assert (body["object"], body["status"], body["instructions"]) == ("response", "incomplete", "be brief")
    assert body["output"][0]["content"][0]["text"] == kit.text_of(0, 2)
    refused = await lines(http, batch["error_file_id"])
    assert [line["response"]["body"]["error"]["param"] for line in refused] == [
        "background", "previous_response_id",
    ]  # fmt: skip
    assert [job.messages[0]["role"] for job in worker.seen] == ["system"]


async def test_a_bad_file_fails_with_its_lines(
    http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any
) -> None:
    await start_tasks()
    bad = [
        request_of(1),
        b"{",
        request_of(1),
        {**request_of(4), "method": "GET"},
        {**request_of(5), "url": "/x"},
    ]
    batch = await ended(http, (await start(http, bad))["id"], kit)
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    assert [(error["line"], error["param"]) for error in batch["errors"]["data"]] == [
        (2, None), (3, "custom_id"), (4, "method"), (5, "url"),
    ]  # fmt: skip
    empty = await ended(http, (await start(http, [b""]))["id"], kit)
    assert empty["status"] == "failed"
    assert worker.seen == []


async def test_cancel_keeps_what_was_answered(
    http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any
) -> None:
    worker.step_s = 0.05
    await start_tasks(batch_window=4)
    batch = await start(http, [request_of(number) for number in range(200)])

    async def some() -> Any:
        return (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] >= 4

    await kit.eventually(some, 30)
    cancelled = await http.post(f"/v1/batches/{batch['id']}/cancel")
    assert cancelled.json()["status"] in ("cancelling", "cancelled")
    batch = await ended(http, batch["id"], kit)
    assert batch["status"] == "cancelled"
    kept = await lines(http, batch["output_file_id"])
    assert 4 <= len(kept) == batch["request_counts"]["completed"] < 200
    assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).json() == batch
    assert len(worker.seen) < 20


async def test_an_expired_batch_says_so_for_each_line(
    http: httpx.AsyncClient, db: Any, worker: Any, kit: Any, start_tasks: Any
) -> None:
    worker.gate.clear()
    await start_tasks(batch_window=2)
    batch = await start(http, [request_of(number) for number in range(6)])

    async def under_way() -> bool:
        return len(worker.seen) == 2

    await kit.eventually(under_way, 30)
    await db.hset(f"hr:{{files}}:batch:{batch['id']}", "expires", 1)

    async def flagged() -> bool:
        return all([await db.hget(worker.keys.job(job.id), "cancel") for job in worker.seen])

    await kit.eventually(flagged, 30)
    worker.gate.set()
    batch = await ended(http, batch["id"], kit)
    assert batch["status"] == "expired"
    errors = await lines(http, batch["error_file_id"])
    answered = batch["request_counts"]["completed"]
    assert len(errors) + answered == 6
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


async def test_two_processes_and_a_death_answer_each_line_once(
    http: httpx.AsyncClient, worker: Any, kit: Any, start_tasks: Any
) -> None:
    first = await start_tasks(batch_window=16)
    await start_tasks(batch_window=16)
    batch = await start(http, [request_of(number) for number in range(150)])

    async def some() -> Any:
        return (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] >= 20

    await kit.eventually(some, 30)
    first.cancel()
    batch = await ended(http, batch["id"], kit)
    assert batch["request_counts"] == {"total": 150, "completed": 150, "failed": 0}
    found = [line["custom_id"] for line in await lines(http, batch["output_file_id"])]
    assert sorted(found) == sorted(f"r{number}" for number in range(150))
    assert len(worker.seen) == 150


async def test_a_process_killed_in_the_middle(
    http: httpx.AsyncClient, redis_url: str, worker: Any, kit: Any, start_tasks: Any
) -> None:
    env = os.environ | {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_BATCH_WINDOW": "8"}
    worker.step_s = 0.01
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway.tasks", env=env)
    try:
        batch = await start(http, [request_of(number) for number in range(100)])

        async def some() -> Any:
            return (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] >= 10

        await kit.eventually(some, 30)
    finally:
        process.kill()
        await process.wait()
    await start_tasks()
    batch = await ended(http, batch["id"], kit)
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert len({line["custom_id"] for line in await lines(http, batch["output_file_id"])}) == 100
    assert len(worker.seen) == 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(k): "" for k in range(17)}}, "metadata"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    files = {"file": ("in.jsonl", b"x")}
    uploaded = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    response = await http.post(
        "/v1/batches", json={"input_file_id": uploaded["id"], "endpoint": CHAT, **fields}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_file_that_is_not_there(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/batches", json={"input_file_id": "file-0", "endpoint": CHAT})
    assert response.status_code == 404
    assert (await http.get("/v1/batches/batch_0")).status_code == 404

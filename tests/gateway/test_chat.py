"""Chat completions through the official client, and what strict readers see on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from httpx_sse import aconnect_sse

pytestmark = pytest.mark.redis
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(gateway: Any, worker: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_an_answer_is_whole(client: Any, kit: Any) -> None:
    done = await client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=5, seed=7)
    (choice,) = done.choices
    assert done.id.startswith("chatcmpl-")
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content == kit.text_of(0, 5)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 5, 8)
    assert done.usage.prompt_tokens_details.cached_tokens == 1
    assert (done.system_fingerprint, done.model, done.seed) == (kit.FINGERPRINT, "smollm2", 7)


async def test_a_stream_says_the_same_as_the_whole(client: Any, kit: Any) -> None:
    stream = await client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == kit.text_of(0, 5)
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert last.choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.completion_tokens) == ([], 5)
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_bytes_of_a_stream(http: httpx.AsyncClient, worker: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    async with aconnect_sse(http, "POST", "/v1/chat/completions", json=body) as source:
        assert source.response.headers["cache-control"] == "no-store, no-transform"
        assert "content-encoding" not in source.response.headers
        events = [event async for event in source.aiter_sse()]
    assert events[-1].data == "[DONE]"
    objects = [json.loads(event.data) for event in events[:-1]]
    assert {chunk["object"] for chunk in objects} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in objects)
    assert objects[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert objects[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]


async def test_two_choices(client: Any, kit: Any) -> None:
    done = await client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=3, n=2)
    assert [choice.message.content for choice in done.choices] == [kit.text_of(0, 3), kit.text_of(1, 3)]
    stream = await client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=3, n=2, stream=True
    )
    texts, roles, reasons = {0: "", 1: ""}, [], []
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
        reasons += [choice.index] if choice.finish_reason else []
    assert texts == {0: kit.text_of(0, 3), 1: kit.text_of(1, 3)}
    assert sorted(roles) == sorted(reasons) == [0, 1]


async def test_logprobs(client: Any, kit: Any) -> None:
    options = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    done = await client.chat.completions.create(**options)
    content = done.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a0 ", "a1 "]
    assert content[0].bytes == list(b"a0 ")
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a0 0", -0.5), ("a0 1", -1.5)]
    stream = await client.chat.completions.create(**options, stream=True)
    streamed = [
        entry
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == content


async def test_what_the_worker_is_asked(client: Any, worker: Any) -> None:
    await client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        max_completion_tokens=2,
        temperature=0,
        stop=["x"],
        seed=5,
        user="someone",
        extra_body={"top_k": 3, "ttl_ms": 60_000, "class": "high", "tenant": "t1", "nobody_knows": [1]},
    )
    (job,) = worker.seen
    assert (job.job_class, job.tenant, job.ttl_ms, job.on_disconnect) == ("high", "t1", 60_000, "continue")
    assert (job.params.max_tokens, job.params.temperature, job.params.stop) == (2, 0.0, ("x",))
    assert (job.params.top_k, job.params.seed) == (3, 5)


async def test_a_failed_job_is_an_error_with_its_own_status(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "fail context_length_exceeded"}]
        )
    assert (refused.value.code, refused.value.type) == ("context_length_exceeded", "invalid_request_error")


@pytest.mark.parametrize("code", ["poison", "non_finite", "deadline_exceeded", "lost"])
async def test_what_cannot_be_helped_is_not_asked_again(client: Any, worker: Any, code: str) -> None:
    """By itself OpenAI's client repeats whatever is answered by 409 or 5xx."""
    messages = [{"role": "user", "content": f"fail {code}"}]
    with pytest.raises(openai.APIStatusError) as failed:
        await client.with_options(max_retries=2).chat.completions.create(model="smollm2", messages=messages)
    assert failed.value.code == code
    assert len(worker.seen) == 1


async def test_what_may_be_helped_is_asked_again(client: Any, worker: Any) -> None:
    messages = [{"role": "user", "content": "fail internal"}]
    with pytest.raises(openai.InternalServerError):
        await client.with_options(max_retries=1).chat.completions.create(model="smollm2", messages=messages)
    assert len(worker.seen) == 2


async def test_a_failure_in_a_stream_is_told_and_ends_it(client: Any, http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "fail non_finite"}]
    stream = await client.chat.completions.create(model="smollm2", messages=messages, stream=True)
    with pytest.raises(openai.APIError) as failed:
        async for _ in stream:
            pass
    assert failed.value.code == "non_finite"
    answer = await http.post("/v1/chat/completions", json={"messages": messages, "stream": True})
    events = [line for line in answer.text.split("\n\n") if line.startswith("data:")]
    assert '"error"' in events[-1]
    assert "[DONE]" not in answer.text


async def test_a_cancelled_job_ends_its_stream_with_an_error(client: Any, http: Any, worker: Any) -> None:
    worker.step_s = 0.01
    stream = await client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=5000, stream=True
    )

    async def read_on() -> None:
        async for chunk in stream:
            await http.delete(f"/v1/jobs/{chunk.id}")

    with pytest.raises(openai.APIError) as failed:
        await read_on()
    assert failed.value.code == "cancelled"


async def test_the_synchronous_client(gateway: Any, worker: Any, kit: Any) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="smollm2", messages=MESSAGES, max_tokens=3, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == kit.text_of(0, 3)

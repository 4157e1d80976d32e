"""Text completions: one prompt or several, as text or ids, echoed or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.redis


@pytest.fixture
async def client(gateway: Any, worker: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_one_prompt_and_its_default_length(client: Any, worker: Any, kit: Any) -> None:
    done = await client.completions.create(model="smollm2", prompt="once")
    assert worker.seen[0].params.max_tokens == 16
    assert done.choices[0].text == kit.text_of(0, 16)
    assert (done.object, done.id[:5], done.choices[0].finish_reason) == ("text_completion", "cmpl-", "length")


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
async def test_a_prompt_of_ids(client: Any, worker: Any, prompt: list[Any]) -> None:
    await client.completions.create(model="smollm2", prompt=prompt, max_tokens=1)
    assert worker.seen[0].prompt_token_ids == (1, 2, 3)


async def test_several_prompts_are_numbered_in_order(client: Any, worker: Any, kit: Any) -> None:
    done = await client.completions.create(model="smollm2", prompt=["x", "y"], n=2, max_tokens=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in done.choices] == [kit.text_of(0, 2), kit.text_of(1, 2)] * 2
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (6, 8)
    assert sorted(job.prompt for job in worker.seen) == ["x", "y"]


async def test_several_prompts_in_one_stream(client: Any, kit: Any) -> None:
    stream = await client.completions.create(
        model="smollm2",
        prompt=["x", "y", [4, 5]][:2],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    texts: dict[int, str] = {}
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == {0: kit.text_of(0, 3), 1: kit.text_of(0, 3)}
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 6)


async def test_echo_puts_the_prompt_before_each_choice(client: Any, worker: Any, kit: Any) -> None:
    options = {"model": "smollm2", "prompt": "prompt", "echo": True, "n": 2, "max_tokens": 2}
    done = await client.completions.create(**options)
    assert [choice.text for choice in done.choices] == ["prompt" + kit.text_of(i, 2) for i in (0, 1)]
    texts = {0: "", 1: ""}
    async for chunk in await client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: done.choices[0].text, 1: done.choices[1].text}
    assert not any(job.params.echo for job in worker.seen)


async def test_echoed_logprobs_begin_with_the_prompts(client: Any) -> None:
    options = {"model": "smollm2", "prompt": "prompt", "echo": True, "max_tokens": 2, "logprobs": 1}
    done = await client.completions.create(**options)
    lists = done.choices[0].logprobs
    assert lists.tokens == ["pro", "mpt", "a0 ", "a1 "]
    assert lists.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert lists.text_offset == [0, 3, 6, 9]
    assert lists.top_logprobs == [None, {"mpt0": -0.5}, {"a0 0": -0.5}, {"a1 0": -0.5}]
    offsets: list[int] = []
    async for chunk in await client.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs:
            offsets += chunk.choices[0].logprobs.text_offset
    assert offsets == [0, 3, 6, 9]


async def test_one_failing_prompt_fails_the_request_and_cancels_the_others(
    client: Any, http: Any, worker: Any, kit: Any
) -> None:
    worker.step_s = 0.02
    with pytest.raises(openai.InternalServerError) as failed:
        await client.completions.create(model="smollm2", prompt=["fail internal", "long"], max_tokens=5000)
    assert failed.value.code == "internal"
    other = next(job for job in worker.seen if job.prompt == "long")

    async def cancelled() -> bool:
        return (await http.get(f"/v1/jobs/{other.id}")).json()["status"] == "cancelled"

    await kit.eventually(cancelled)

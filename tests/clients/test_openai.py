"""OpenAI's own Python client, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.redis]


@pytest.fixture
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def test_chat(client: openai.OpenAI, kit: Any, expected: str) -> None:
    answer = client.chat.completions.create(**kit.ASK)
    (choice,) = answer.choices
    assert choice.message.content == expected
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_chat_streamed(client: openai.OpenAI, kit: Any, expected: str) -> None:
    chunks = list(
        client.chat.completions.create(**kit.ASK, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_the_stream_helper_accumulates(client: openai.OpenAI, kit: Any, expected: str) -> None:
    stop = expected.split()[1]  # the helper takes an answer cut short for a failure
    with client.chat.completions.stream(**kit.ASK, stop=[stop]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == expected.split(stop)[0]


def test_parameters(client: openai.OpenAI, kit: Any, expected: str) -> None:
    ask = {**kit.ASK, "temperature": 1.0, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 0}
    ask["max_completion_tokens"] = ask.pop("max_tokens")
    ask["messages"] = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 2
    assert first.choices[0].logprobs is not None
    assert len(first.choices[0].logprobs.content or []) == 24
    stop = expected.split()[1]
    stopped = client.chat.completions.create(**kit.ASK, stop=[stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == expected.split(stop)[0]


def test_completions(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "prompt": ["one", "two"], "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**ask, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 5
    texts = ["", ""]
    for chunk in client.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_models(client: openai.OpenAI) -> None:
    assert "smollm2" in {model.id for model in client.models.list()}
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_refusals_are_of_the_clients_own_kinds(client: openai.OpenAI, kit: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**kit.ASK, "model": "nobody"})
    assert (unknown.value.code, unknown.value.param) == ("unknown_model", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**kit.ASK, "temperature": -1})
    assert (bad.value.code, bad.value.param) == ("invalid_request", "temperature")
    function: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(**kit.ASK, tools=[function])
    assert tools.value.param == "tools"


def test_a_client_that_leaves_cancels_its_job(client: openai.OpenAI, kit: Any, stack: Any) -> None:
    with client.chat.completions.create(**{**kit.ASK, "max_tokens": 4000}, stream=True) as stream:
        for number, _ in enumerate(stream):
            if number == 3:
                break
    stack.eventually(stack.idle)


async def test_many_at_once(stack: Any, kit: Any, expected: str) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**kit.ASK) for _ in range(40)))
    assert {answer.choices[0].message.content for answer in answers} == {expected}

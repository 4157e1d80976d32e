"""Frameworks that speak OpenAI's API: LangChain, LiteLLM and Vercel's AI SDK."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look at the network while it is imported
os.environ.setdefault("LANGSMITH_TRACING", "false")
pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def langchain(stack: Any) -> Any:
    from langchain_openai import ChatOpenAI  # slow to import, as is litellm

    return ChatOpenAI(
        model="smollm2",
        base_url=f"{stack.url}/v1",
        api_key="any",
        temperature=0,
        max_tokens=24,
        max_retries=0,
        stream_usage=True,
    )


def test_langchain(langchain: Any, expected: str) -> None:
    answer = langchain.invoke("Hello")
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == 24
    chunks = list(langchain.stream("Hello"))
    assert "".join(chunk.content for chunk in chunks) == expected
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.usage_metadata["output_tokens"] == 24
    assert whole.response_metadata["finish_reason"] == "length"


async def test_langchain_in_batches(langchain: Any, expected: str) -> None:
    answers = await langchain.abatch(["Hello"] * 8)
    assert {answer.content for answer in answers} == {expected}


def test_langchain_is_told_what_is_not_there_yet(langchain: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="tools"):
        langchain.bind_tools([{"name": "f", "description": "f", "parameters": {}}]).invoke("Hello")


@pytest.fixture
def litellm() -> Any:
    import litellm

    return litellm


async def test_litellm(litellm: Any, stack: Any, kit: Any, expected: str) -> None:
    ask = {**kit.ASK, "model": "openai/smollm2", "api_base": f"{stack.url}/v1", "api_key": "any"}
    answer = litellm.completion(**ask, num_retries=0)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 24
    stream = await litellm.acompletion(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].finish_reason == "length"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**ask, "model": "openai/nobody"}, num_retries=0)


def test_vercels_ai_sdk(stack: Any, node_project: Path, expected: str) -> None:
    command = ["node", "ask.mjs", stack.url]
    done = subprocess.run(command, cwd=node_project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout)
    assert got["whole"]["text"] == got["streamed"]["text"] == expected
    assert got["whole"]["finish"] == got["streamed"]["finish"] == "length"
    assert got["whole"]["usage"]["outputTokens"] == got["streamed"]["usage"]["outputTokens"] == 24
    assert got["streamed"]["pieces"] > 5
    assert got["failure"]["status"] == 404
    assert "nobody" in got["failure"]["message"]
    assert got["failure"]["retryable"] is False
    assert got["seen"] >= 3
    stack.eventually(stack.idle)  # the reader that left took its job along

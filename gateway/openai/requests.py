"""From an OpenAI-shaped request to planned jobs. The rules are those of `headrace.submission`."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from litestar import Request

from gateway.core import Gateway
from gateway.directory import Pool
from gateway.disconnect import parse_on_disconnect
from gateway.openai.schema import ChatRequest, CompletionRequest, OpenAIRequest
from gateway.openai.serve import Head, Plan
from gateway.store import JobRef, new_id
from gateway.submitting import new_job
from headrace.errors import HeadraceError
from headrace.messages import SamplingParams
from headrace.submission import Prompt, parse_request

MAX_PROMPTS = 128
MAX_CHOICES = 256
COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat goes on to its end
_NOT_YET = ("functions", "function_call", "suffix")


async def plan_chat(gateway: Gateway, request: Request[Any, Any, Any], data: ChatRequest) -> Plan:
    """Raises HeadraceError naming the field, `unknown_model`, RedisError."""
    prompt, params = parse_request("chat", checked_values(data))
    pool = await gateway.route(data.model)
    head = _head(data, pool, new_id("chatcmpl-"), params)
    return _plan(request, data, pool, head, [(prompt, params)])


async def plan_completion(gateway: Gateway, request: Request[Any, Any, Any], data: CompletionRequest) -> Plan:
    """As `plan_chat`, with one job for each prompt."""
    values = checked_values(data)
    parsed = [
        completion_params(*parse_request("completion", {**values, "prompt": prompt}))
        for prompt in split_prompts(data.prompt)
    ]
    pool = await gateway.route(data.model)
    echo = tuple(prompt.value for prompt, _ in parsed) if data.echo else None
    head = _head(data, pool, new_id("cmpl-"), parsed[0][1], echo)
    return _plan(request, data, pool, head, parsed)


def split_prompts(prompt: str | list[Any]) -> list[Any]:
    """A string or a list of ids is one prompt; a list of those is several. Raises `invalid_request`."""
    if isinstance(prompt, str) or (prompt and all(type(item) is int for item in prompt)):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1 or not kinds <= {str, list}:
        raise HeadraceError(
            "invalid_request", "A string, token ids, or a list of either is needed.", "prompt"
        )
    if len(prompt) > MAX_PROMPTS:
        raise HeadraceError("invalid_request", f"At most {MAX_PROMPTS} prompts a request.", "prompt")
    return prompt


def completion_params(prompt: Prompt, params: SamplingParams) -> tuple[Prompt, SamplingParams]:
    """The gateway itself puts the prompt before the text, so the job has no `echo`."""
    if params.echo and prompt.field != "prompt":
        raise HeadraceError("invalid_request", "echo with token ids is not supported; send text.", "echo")
    max_tokens = params.max_tokens or COMPLETION_TOKENS
    prompt_logprobs = params.logprobs if params.echo else params.prompt_logprobs
    return prompt, msgspec.structs.replace(
        params, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, echo=False
    )


def _plan(
    request: Request[Any, Any, Any],
    data: OpenAIRequest,
    pool: Pool,
    head: Head,
    parsed: list[tuple[Prompt, SamplingParams]],
) -> Plan:
    if len(parsed) * head.num_choices > MAX_CHOICES:
        raise HeadraceError("invalid_request", f"At most {MAX_CHOICES} choices a request.", "n")
    ids = [head.id] if len(parsed) == 1 else [f"{head.id}-{index}" for index in range(len(parsed))]
    jobs = [
        new_job(request, data, JobRef(pool.name, job_id), prompt, params)
        for job_id, (prompt, params) in zip(ids, parsed, strict=True)
    ]
    policy = parse_on_disconnect(data.on_disconnect, "cancel")
    return Plan(head, jobs, policy, stream=bool(data.stream))


def _head(
    data: OpenAIRequest,
    pool: Pool,
    answer_id: str,
    params: SamplingParams,
    echo: tuple[str, ...] | None = None,
) -> Head:
    return Head(
        id=answer_id,
        created_s=int(time.time()),
        model=data.model or pool.name,
        fingerprint=pool.fingerprint,
        num_choices=params.n,
        include_usage=bool(data.stream_options and data.stream_options.include_usage),
        echo=echo,
    )


def checked_values(data: OpenAIRequest) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(data)
    for name in _NOT_YET:
        if values.get(name):
            raise HeadraceError("invalid_request", f"{name} is not supported.", name)
    return values

"""OpenAI's request and response shapes, and ours beside them. Fields not named here are ignored."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.dto import DTOConfig

from gateway.decoding import StrictDTO
from gateway.fields import Generation


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class OpenAIRequest(Generation, kw_only=True, omit_defaults=True):
    """What both endpoints take."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatRequest(OpenAIRequest, kw_only=True, omit_defaults=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None


class CompletionRequest(OpenAIRequest, kw_only=True, omit_defaults=True):
    """`prompt` is a string, a list of token ids, or a list of either; each of several prompts is a job."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ChatDTO(StrictDTO[ChatRequest]):
    config = DTOConfig(max_nested_depth=3)


class CompletionDTO(StrictDTO[CompletionRequest]):
    config = DTOConfig(max_nested_depth=3)


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class UsageBody(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody | None = None
    system_fingerprint: str | None = None
    seed: int | None = None  # the seed in force, so that the answer can be drawn again


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """`usage` is left out unless the request asked for it; then it is null on all chunks but the last."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


class TextLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry a token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(msgspec.Struct, kw_only=True):
    """Also the chunk of a stream: the two have the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str | None = None
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "headrace"
    pool: str
    workers: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]

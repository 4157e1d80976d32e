"""The shapes of OpenAI's Responses API. Fields not named here are ignored."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.dto import DTOConfig

from gateway.decoding import StrictDTO
from gateway.fields import Treated


class ResponseRequest(Treated, kw_only=True, omit_defaults=True):
    """`input` is a string or a list of items: messages of text, and those of an earlier response's output."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None


class ResponseDTO(StrictDTO[ResponseRequest]):
    config = DTOConfig(max_nested_depth=3)


class TextTop(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TextTop]


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TextLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: list[OutputText]


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str


class Reasoning(msgspec.Struct, kw_only=True, frozen=True):
    effort: None = None
    summary: None = None


class TextFormat(msgspec.Struct, kw_only=True, frozen=True):
    type: str = "text"


class TextConfig(msgspec.Struct, kw_only=True, frozen=True):
    format: TextFormat = TextFormat()


class ResponseBody(msgspec.Struct, kw_only=True, frozen=True):
    """A response. Stored as it is when created; status, output and usage are the job's."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "queued"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = Reasoning()
    store: bool = True
    temperature: float = 1.0
    text: TextConfig = TextConfig()
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False

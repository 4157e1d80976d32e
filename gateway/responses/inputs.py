"""From the Responses API's items to chat messages. What is not text is refused, never left out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.fields import Sampling
from gateway.responses.schema import ResponseBody, ResponseRequest
from headrace.errors import HeadraceError
from headrace.messages import SamplingParams
from headrace.submission import Prompt, parse_request

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = {"developer": "system"}  # what templates of open models call it
_PASSED = (*Sampling.__struct_fields__, "stop", "tools", "tool_choice")
_ONLY = {"truncation": ("disabled",), "tool_choice": ("auto", "none")}


def check_request(data: ResponseRequest) -> None:
    """Raises HeadraceError for what is not supported, or not together."""
    for name in ("conversation", "prompt", "tools"):
        if getattr(data, name):
            raise _invalid(f"{name} is not supported.", name)
    for name, allowed in _ONLY.items():
        if getattr(data, name) not in (None, *allowed):
            raise _invalid(f"Only {' or '.join(allowed)} is supported.", name)
    for name in data.include or ():
        if name != LOGPROBS:
            raise _invalid(f"Only {LOGPROBS} can be included.", "include")
    if (data.text or {}).get("format") not in (None, {"type": "text"}):
        raise _invalid('Only {"type": "text"} is supported.', "text.format")
    if data.background and data.store is False:
        raise _invalid("A background response has to be stored.", "store")
    check_metadata(data.metadata or {})


def check_metadata(metadata: Mapping[str, str]) -> None:
    fits = len(metadata) <= MAX_METADATA and all(
        len(key) <= MAX_METADATA_KEY and len(value) <= MAX_METADATA_VALUE for key, value in metadata.items()
    )
    if not fits:
        limits = f"{MAX_METADATA} pairs of {MAX_METADATA_KEY} and {MAX_METADATA_VALUE} characters"
        raise _invalid(f"At most {limits}.", "metadata")


def input_items(data: ResponseRequest) -> list[dict[str, Any]]:
    """The request's own items as they are kept, a string as the message it stands for."""
    if isinstance(data.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": data.input}]}]
    if not data.input:
        raise _invalid("At least one item is needed.", "input")
    return data.input


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [_message(f"input[{index}]", item) for index, item in enumerate(items)]


def _message(field: str, item: Mapping[str, Any]) -> dict[str, str]:
    if item.get("type", "message") != "message":
        raise _invalid(f"Items of type {str(item.get('type'))[:40]!r} are not supported.", f"{field}.type")
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not role:
        raise _invalid("A message needs a role.", f"{field}.role")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _invalid("A string or a list of text parts is needed.", f"{field}.content")
    text = "".join(_part(f"{field}.content[{index}]", part) for index, part in enumerate(parts))
    return {"role": _ROLES.get(role, role), "content": text}


def _part(field: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise _invalid("Only text parts are supported.", field)
    return text


def parse_response(
    data: ResponseRequest, messages: Sequence[Mapping[str, str]]
) -> tuple[Prompt, SamplingParams]:
    """What the job is to do. Raises HeadraceError naming the field of the Responses API."""
    values: dict[str, Any] = {name: getattr(data, name) for name in _PASSED}
    values["tool_choice"] = None  # without tools there is no choice
    if LOGPROBS in (data.include or ()) or data.top_logprobs:
        values |= {"logprobs": True, "top_logprobs": data.top_logprobs}
    values |= {"max_tokens": data.max_output_tokens, "messages": [dict(message) for message in messages]}
    try:
        return parse_request("chat", values)
    except HeadraceError as exc:
        field = (exc.field or "").replace("max_tokens", "max_output_tokens").replace("messages", "input")
        raise HeadraceError(exc.code, exc.message, field or None) from None


def body_of(data: ResponseRequest, params: SamplingParams, response_id: str, model: str) -> ResponseBody:
    """The response as it is before its job has begun."""
    return ResponseBody(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if data.background else "in_progress",
        background=bool(data.background),
        instructions=data.instructions,
        max_output_tokens=data.max_output_tokens,
        metadata=data.metadata or {},
        model=model,
        previous_response_id=data.previous_response_id,
        store=data.store is not False,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=data.top_logprobs or 0,
        user=data.user,
    )


def _invalid(message: str, field: str) -> HeadraceError:
    return HeadraceError("invalid_request", message, field)

"""The shapes of /v1/jobs. Fields are named as in the queue entry and the job's hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from litestar.dto import DTOConfig

from gateway.decoding import StrictDTO
from gateway.fields import Generation
from gateway.store import JobRef
from headrace.messages import Result, Usage


class JobRequest(Generation, kw_only=True, omit_defaults=True):
    """One of `prompt`, `messages`, `prompt_token_ids` or `body` (a whole OpenAI-shaped request) is needed."""

    pool: str | None = None
    id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    body: dict[str, Any] | None = None
    v: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    traceparent: str | None = None
    meta: Any = None


class JobDTO(StrictDTO[JobRequest]):
    config = DTOConfig(max_nested_depth=3)


class JobState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A job's hash. Times are ms of Redis's clock; what is not known yet is left out.

    While it waits: `position` within its class (1: next), and estimates: the tokens ahead of it, as fair
    sharing counts them, and ms until it starts.
    """

    id: str
    object: str = msgspec.field(default_factory=lambda: "job")  # a factory, so that it is always written
    pool: str
    status: str
    seq: int | None = None
    epoch: int | None = None
    attempt: int | None = None
    worker: str | None = None
    job_class: str | None = msgspec.field(default=None, name="class")
    tenant: str | None = None
    t_submit: int | None = None
    t_start: int | None = None
    t_first: int | None = None
    t_end: int | None = None
    deadline: int | None = None
    cancel: bool | None = None
    position: int | None = None
    ahead_tokens: int | None = None
    eta_ms: int | None = None
    usage: Usage | None = None
    result: Result | None = None
    error: dict[str, Any] | None = None
    meta: Any = None


_TIMES = ("t_submit", "t_start", "t_first", "t_end", "deadline", "eta_ms")
_INTS = ("seq", "epoch", "attempt", "ahead_tokens", *_TIMES)


def job_state(ref: JobRef, fields: Mapping[str, str]) -> JobState:
    """Reads a job's hash. What somebody else wrote there and cannot be read is left out."""
    state = JobState(id=ref.id, pool=ref.pool, status=fields.get("status", "queued"))
    for name in _INTS:
        text = fields.get(name, "")
        if text.lstrip("-").isdigit():
            setattr(state, name, int(text))
    state.job_class = fields.get("class")
    state.worker, state.tenant = fields.get("worker"), fields.get("tenant")
    state.cancel = fields.get("cancel", "") not in ("", "0", "false") or None
    state.usage = _json(fields.get("usage"), Usage)
    state.result = _json(fields.get("result"), Result)
    state.error = _json(fields.get("error"), dict)
    state.meta = state.result.meta if state.result is not None else None
    return state


def _json(text: str | None, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind) if text else None
    except msgspec.MsgspecError:
        return None

"""The wire types of protocol version 1. Parsing a queue entry into a `Job` is in `submission.py`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

CLASSES = ("high", "normal", "low")
JobClass = Literal["high", "normal", "low"]
Status = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")
FinishReason = Literal["stop", "length", "tool_calls"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn and when generation ends. Names and ranges are those of docs/PROTOCOL.md."""

    max_tokens: int | None = None  # None: the worker's default, bounded by the context
    min_tokens: int = 0
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: derived from the job's id
    n: int = 1
    best_of: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # whether the stop string stays in the text
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None  # None: off; 0: chosen token only; k: also the k most likely
    prompt_logprobs: int | None = None
    echo: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded submission. Exactly one of `prompt`, `messages`, `prompt_token_ids` is set."""

    id: str
    pool: str
    job_class: JobClass
    entry_id: str  # of the queue stream, "<ms>-<n>"
    tenant: str = "default"
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    params: SamplingParams = SamplingParams()
    ttl_ms: int | None = None
    webhook: str | None = None
    traceparent: str | None = None
    meta: msgspec.Raw | None = None  # JSON, returned as it came
    strict_deadline: bool = False
    on_disconnect: str = "continue"  # "continue", "cancel", "cancel_after:<s>"
    priority_policy: str | None = None


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of `lp`: the token's id, natural log-probability (never -inf: -9999.0) and UTF-8 bytes."""

    id: int
    lp: float
    b: list[int]
    top: list[TokenLogprob] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta", tag_field="type", omit_defaults=True):
    """New text of choice `i`. `ids` are the tokens computed, also those whose text is still held back."""

    seq: int
    i: int = 0
    text: str = ""
    ids: list[int] = []
    lp: list[TokenLogprob] | None = None
    cached: int = 0  # on the job's first event: prompt tokens taken from the prefix cache
    prompt_lp: list[TokenLogprob | None] | None = None  # on the job's first event, when asked for


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish", tag_field="type", omit_defaults=True):
    """Choice `i` is complete. `stop` tells which stop string (or token id) ended it, if one did."""

    seq: int
    i: int = 0
    reason: FinishReason
    stop: str | int | None = None


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="type", omit_defaults=True):
    """The terminal event: exactly one ends every log."""

    seq: int
    status: Literal["done", "failed", "cancelled"]
    usage: Usage | None = None
    error: dict[str, Any] | None = None


Event = Delta | Finish | End


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    text: str
    ids: list[int]
    finish_reason: FinishReason | None = None  # None: the job ended before this choice was complete
    stop: str | int | None = None
    lp: list[TokenLogprob] | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The `result` field of a job's hash, JSON."""

    choices: list[Choice]
    fingerprint: str = ""
    model: str = ""
    seed: int | None = None  # the seed in force, so that the run can be repeated
    params: SamplingParams | None = None  # as submitted
    prompt_ids: list[int] | None = None
    meta: msgspec.Raw | None = None  # as the producer sent it
    prompt_lp: list[TokenLogprob | None] | None = None

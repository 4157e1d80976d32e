"""Fields that requests have in common: how tokens are drawn, what is generated, how the job is treated."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How each token is drawn: what a fork may change, and a response may set."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None


class Treated(Sampling, kw_only=True, omit_defaults=True):
    """And by which model, for whom, how urgently, when the job is dropped, and who is told of its end."""

    model: str | None = None
    stop: str | list[str] | None = None
    job_class: str | None = msgspec.field(default=None, name="class")
    tenant: str | None = None
    ttl_ms: int | None = None
    strict_deadline: bool | None = None
    on_disconnect: str | None = None
    webhook: str | None = None


class Generation(Treated, kw_only=True, omit_defaults=True):
    """And what is generated, under the names of the queue entry."""

    max_tokens: int | None = None
    n: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop: bool | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None

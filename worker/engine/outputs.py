"""What a step hands over to the rest of the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import HeadraceError
from worker.engine.plan import ScoredToken

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of one choice; `finish` is set on its last."""

    request_id: str
    choice: int
    token_id: int
    scored: ScoredToken | None
    finish: Finish | None
    stop_token: int | None  # the id among stop_token_ids that ended it; None for eos
    cached_tokens: int  # prompt tokens taken from the prefix cache
    prompt_logprobs: tuple[ScoredToken, ...] | None  # prompt_ids[1:], once, with the request's first token
    step: int


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """A choice that is complete without a further token: max_tokens 0, or a log that lacks only its end."""

    request_id: str
    choice: int
    finish: Finish
    stop_token: int | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[ScoredToken, ...] | None = None


@dataclass(frozen=True, slots=True)
class FailedOutput:
    """The whole request has ended with an error; its blocks are free."""

    request_id: str
    error: HeadraceError


Output = TokenOutput | FinishedOutput | FailedOutput

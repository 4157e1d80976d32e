"""The closed list of error codes. Every refusal and every failed job carries exactly one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LEAST_RETRY_S, MOST_RETRY_S = 1, 120


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """What is fixed for a code: whether trying again may help, its HTTP status, its default message."""

    retryable: bool
    http_status: int
    message: str


ERRORS: dict[str, ErrorSpec] = {
    "invalid_request": ErrorSpec(False, 400, "The request is not valid."),
    "too_large": ErrorSpec(False, 413, "The request is larger than this pool accepts."),
    "context_length_exceeded": ErrorSpec(False, 400, "The prompt is longer than the model's context."),
    "unknown_model": ErrorSpec(False, 404, "No pool serves this model."),
    "conflict": ErrorSpec(False, 409, "This key or id is already used by a different request."),
    "overloaded": ErrorSpec(True, 429, "The queue is full; try again later."),
    "rate_limited": ErrorSpec(True, 429, "The rate limit is reached; try again later."),
    "deadline_exceeded": ErrorSpec(False, 504, "The time allowed for the job ran out."),
    "cannot_meet_deadline": ErrorSpec(True, 429, "The deadline cannot be met under the present load."),
    "capacity": ErrorSpec(False, 400, "The request can never fit this worker's KV cache."),
    "non_finite": ErrorSpec(False, 500, "The model produced values that are not finite."),
    "grammar": ErrorSpec(False, 400, "The grammar cannot be compiled or allows no token."),
    "poison": ErrorSpec(False, 500, "The job was given up after it ended several workers."),
    "lost": ErrorSpec(False, 500, "Part of the job's state was lost by the server."),
    "internal": ErrorSpec(True, 500, "The job failed because of an internal error."),
}


class HeadraceError(Exception):
    """A refusal or failure with a code of `ERRORS`, a message for people and the field at fault, if any."""

    def __init__(self, code: str, message: str | None = None, field: str | None = None) -> None:
        if code not in ERRORS:
            raise ValueError(f"unknown error code {code!r}")
        self.code = code
        self.message = message or ERRORS[code].message
        self.field = field
        super().__init__(f"{code}: {self.message}" + (f" ({field})" if field else ""))

    @property
    def spec(self) -> ErrorSpec:
        return ERRORS[self.code]

    def to_wire(self) -> dict[str, Any]:
        """The `error` object of an `end` event: code, message, retryable and, if known, field."""
        wire: dict[str, Any] = {"code": self.code, "message": self.message, "retryable": self.spec.retryable}
        if self.field is not None:
            wire["field"] = self.field
        return wire


class Overloaded(HeadraceError):
    """`overloaded`, with the time in which part of the queue will have been served, at the measured pace."""

    def __init__(self, what: str, retry_ms: int) -> None:
        super().__init__("overloaded", f"The queue holds as many {what} as it may; try again later.")
        self.retry_after_s = min(max(math.ceil(retry_ms / 1000), LEAST_RETRY_S), MOST_RETRY_S)
        self.headers = {"Retry-After": str(self.retry_after_s)}

"""What becomes of a job whose client leaves: it goes on, or is cancelled, at once or after a while."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import HeadraceError

_AFTER = re.compile(r"cancel_after:(\d{1,6}(?:\.\d{1,3})?)")


@dataclass(frozen=True, slots=True)
class OnDisconnect:
    """`grace_s` None: the job goes on; else it is cancelled so much later, unless it is followed then."""

    grace_s: float | None


def parse_on_disconnect(text: str | None, default: str) -> OnDisconnect:
    """Reads `continue`, `cancel` or `cancel_after:<s>`. Raises `invalid_request`."""
    value = default if text is None else text
    if value == "continue":
        return OnDisconnect(None)
    if value == "cancel":
        return OnDisconnect(0.0)
    match = _AFTER.fullmatch(value)
    if match is None:
        message = "Expected continue, cancel or cancel_after:<seconds>."
        raise HeadraceError("invalid_request", message, "on_disconnect")
    return OnDisconnect(float(match[1]))

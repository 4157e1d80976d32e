"""Events of which only a word is new: encoded once, and the word spliced in."""

from __future__ import annotations

from typing import Any

import msgspec

_NUL = b"\0"  # encoded JSON has none: it is escaped in strings
_encode = msgspec.json.Encoder().encode
HOLE: Any = msgspec.Raw(_NUL)


class Template:
    """An event that is the same every time but for what goes into its `HOLE`s, encoded once."""

    def __init__(self, encoded: bytes) -> None:
        self._format = encoded.replace(b"%", b"%%").replace(_NUL, b"%b")

    def fill(self, *values: str | int) -> bytes:
        """The event with a value for each hole, in order: what encoding it as a whole would have given."""
        return self._format % tuple(map(_encode, values))

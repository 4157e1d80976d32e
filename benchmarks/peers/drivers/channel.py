"""Requests and answers as JSON lines over a socket. Runs in a peer's own environment: standard library only.

A request is {"id", "prompt_ids", "output_tokens", "arrive_s"}; an answer {"id", "submitted_s", "token_s",
"ended_s", "tokens"}, in seconds since the start of the run.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    id: int
    prompt_ids: list[int]
    output_tokens: int
    arrive_s: float


@dataclass
class Answer:
    id: int
    submitted_s: float
    token_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    tokens: int = 0

    def take(self, count: int, now_s: float) -> None:
        """`count` new tokens are there."""
        self.token_s += [now_s] * count
        self.tokens += count
        self.ended_s = now_s


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self.now_s()))


Run = Callable[[Sequence[Request]], "Sequence[Answer]"]


def serve(fd: int, run: Run, settings: dict[str, str | int] | None = None) -> None:
    """Says that the peer is ready, and how it is set up, then answers one batch of requests a line until the
    other side closes."""
    with socket.socket(fileno=fd) as channel, channel.makefile("rw", encoding="utf-8") as lines:
        _say(lines, {"settings": settings or {}})
        for line in lines:
            requests = [Request(**entry) for entry in json.loads(line)]
            _say(lines, [asdict(answer) for answer in run(requests)])


def _say(lines: Any, message: Any) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()

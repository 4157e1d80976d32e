"""One reader of a job's events: which job, where in its log, and what has come for it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.keys import Keys
from headrace.live import Mailbox
from headrace.messages import End, Event


class Cursor:
    """`last` is the seq the reader has; `event` that very event, if it was read here."""

    def __init__(self, after_seq: int, known: bool) -> None:
        self.last = after_seq
        self.event: Event | None = None
        self.seen = known or after_seq > 0  # whether the job is known to have existed
        self.ended = False

    def take(self, event: Event) -> bool:
        """Goes on to `event` if it is the next. False: it is a repetition or there is a hole before it."""
        if event.seq != self.last + 1:
            return False
        self._move_to(event)
        return True

    def jump(self, event: End) -> None:
        self._move_to(event)

    def _move_to(self, event: Event) -> None:
        self.last, self.event, self.seen = event.seq, event, True
        self.ended = isinstance(event, End)


@dataclass(eq=False, frozen=True, slots=True)
class Reader:
    keys: Keys
    job_id: str
    cursor: Cursor
    mailbox: Mailbox

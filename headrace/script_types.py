"""What the scripts take and give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.messages import End, Event, Result, Usage

Outcome = Literal["run", "ended", "cancelled", "expired", "exhausted", "duplicate", "lost", "stale", "error"]
EmitKind = Literal["ok", "cancel", "stale", "gap", "lost", "error"]
CancelKind = Literal["ended", "flagged", "over", "unknown"]


@dataclass(frozen=True, slots=True)
class FairShare:
    """How a submission's cost is told from its flat fields. The same for every process of a pool.

    cost = prompt bytes / 4 + output_weight * max_tokens * n. A pick's token budget is used up by the prompt's
    estimate and at most `output_reserve` tokens for each choice.
    """

    output_weight: int = 4
    default_output: int = 256
    output_reserve: int = 64


@dataclass(frozen=True, slots=True)
class Submitted:
    job_id: str
    entry_id: str  # "" when an idempotency key found the job
    existing: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One picked entry. `gone`: trimmed or deleted while it waited; claim ends its job as lost."""

    job_class: str
    entry_id: str
    fields: dict[bytes, bytes]
    gone: bool = False

    @property
    def member(self) -> str:
        return f"{self.job_class}-{self.entry_id}"


@dataclass(frozen=True, slots=True)
class Picked:
    entries: list[Entry]
    last_ids: dict[str, str]  # for each class: the id to wait behind with XREAD BLOCK
    waiting: int
    unusable: list[str]  # keys of another type than the protocol's
    apart: bool = False  # these ended a worker together, perhaps: run them with nothing else
    on_duty: bool = False  # such entries wait for this worker to give back what it holds


class ClaimItem(NamedTuple):
    job_class: str
    entry_id: str
    job_id: str
    ttl_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """Only `run` is ours to execute. `stale`: somebody else holds it; `error`: one of its keys is of another
    type; all others were ended or dropped by the script."""

    job_id: str
    outcome: Outcome
    epoch: int
    attempt: int
    left_ms: int | None  # None: no deadline
    last_seq: int
    submitted_ms: int  # on Redis's clock, as `waited_ms`
    waited_ms: int


class HeldJob(NamedTuple):
    """A job in our hands. `epoch` 0: picked but not claimed."""

    job_class: str
    entry_id: str
    job_id: str
    epoch: int

    @property
    def member(self) -> str:
        return f"{self.job_class}-{self.entry_id}"


ClaimRow = ClaimItem | tuple[str, str, str, int | None]
HeldRow = HeldJob | tuple[str, str, str, int]


class Final(msgspec.Struct, frozen=True):
    """The state a job ends with. `undecodable`: also keep the raw entry in the stream of that name."""

    status: Literal["done", "failed", "cancelled"]
    usage: Usage | None = None
    result: Result | None = None
    error: dict[str, Any] | None = None
    undecodable: bool = False


class EmitItem(msgspec.Struct, frozen=True):
    """One job's part of a step. With `final`, the last event is the `End`.

    `force` (with `final` and the `End` alone) closes the job whatever its log holds, behind everything a
    reader can have seen: for a job whose log was found damaged. It still needs the epoch, if one is known.
    """

    job_id: str
    job_class: str
    entry_id: str
    epoch: int
    events: Sequence[Event]
    final: Final | None = None
    prompt_tokens: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        if not self.events:
            raise ValueError("an item needs an event")
        if (self.final is not None) != isinstance(self.events[-1], End):
            raise ValueError("the final state goes with the end event, and only with it")
        if self.force and len(self.events) != 1:
            raise ValueError("a forced item is the end event alone")


@dataclass(frozen=True, slots=True)
class EmitOutcome:
    """`ended`: the item's final state is stored. `epoch` is the item's own."""

    job_id: str
    kind: EmitKind
    epoch: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    lost: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Reaped:
    ended: int = 0
    consumers: int = 0
    restored: int = 0
    clocks: int = 0
    strays: int = 0

    @property
    def total(self) -> int:
        return self.ended + self.consumers + self.restored + self.clocks + self.strays

"""How much one step may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FIXED_TOKENS = 4.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step: tokens computed, and sequences that may run at the same time."""

    num_tokens: int
    num_seqs: int
    prompt_tokens: int  # tokens of a step that draws nobody's next token: there is no one to keep waiting
    fixed_tokens: float = 0.0  # what a step costs beside its tokens, in tokens; 0 also where it is not known


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step did: tokens computed, keys read (sum over tokens of their context), sequences."""

    num_tokens: int
    kv_read: int
    num_seqs: int


class Budget(Protocol):
    def limits(self) -> Limits: ...

    def observe(self, load: StepLoad, duration_s: float) -> None: ...

    def explain(self) -> str: ...


class FixedBudget:
    """The configured bounds, whatever steps take. Each sequence wants a token a step: no more than tokens.

    Nothing is measured: what a step costs beside its tokens is as told, or as small models on CPUs show.
    """

    def __init__(self, num_tokens: int, num_seqs: int, fixed_tokens: float = FIXED_TOKENS) -> None:
        self._limits = Limits(num_tokens, min(num_seqs, num_tokens), num_tokens, fixed_tokens)

    def limits(self) -> Limits:
        return self._limits

    def observe(self, load: StepLoad, duration_s: float) -> None:
        pass

    def explain(self) -> str:
        return f"fixed: {self._limits.num_tokens} tokens, {self._limits.num_seqs} sequences"

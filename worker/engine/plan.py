"""What passes between scheduler and runner: a frozen plan in, a frozen result out, and nothing else.

Positions count from 0 over prompt and output together. `seq_id` names one choice of one request for as
long as it is in the engine and is never used again. A preempted sequence starts again at 0 (or behind a
prefix hit) under its old `seq_id`, after `Runner.forget`. Block tables and token lists are live: they only
grow, and belong to the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import HeadraceError
from headrace.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How the token after this chunk is drawn. The draw is a function of (seed, choice, position) alone."""

    params: SamplingParams
    seed: int  # in force: the job's own or derived from its id
    choice: int
    position: int  # 0 for the first generated token
    prompt_ids: Sequence[int]  # for the repetition penalty
    output_ids: Sequence[int]  # tokens generated so far, for penalties and bad words
    ban_stop_tokens: bool  # min_tokens is not reached: every eos and stop token id is masked

    def behind(self, guesses: int) -> SamplePlan:
        """The draw behind so many guesses; of parameters that look at the output before it there are none."""
        position = self.position + guesses
        return replace(self, position=position, ban_stop_tokens=position < self.params.min_tokens)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's part of a step: `token_ids` are computed at positions start, start+1, …"""

    seq_id: int
    token_ids: Sequence[int]  # at least one
    start: int  # tokens whose keys and values are already in the blocks
    block_table: Sequence[int]  # covers start + len(token_ids) positions
    sample: SamplePlan | None  # None: nothing to draw (more of the prompt follows, or max_tokens is 0)
    prompt_logprobs: int | None = None  # also score token_ids[1:] and the token after the chunk, top k
    next_prompt_id: int | None = None  # the prompt token after the chunk, when prompt_logprobs asks for it
    num_guesses: int = (
        0  # the last so many token_ids are guesses at what `sample` and its followers will draw
    )
    pending: bool = False  # the one token_id is not known yet: it is what the step before this one draws

    def known(self) -> SequencePlan | None:
        """With the token that was pending, once it is drawn; None where it never came."""
        if not self.pending or self.sample is None:
            return self
        token_ids = self.sample.output_ids[self.sample.position - 1 : self.sample.position]
        return replace(self, token_ids=tuple(token_ids), pending=False) if token_ids else None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine. `block_copies` (source, destination) happen before anything is computed."""

    step: int
    sequences: tuple[SequencePlan, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)

    def known(self) -> StepPlan:
        """To be run by itself, after the step before it was applied; parts that depend on no token of it."""
        parts = (part.known() for part in self.sequences)
        return replace(self, sequences=tuple(part for part in parts if part is not None))


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability under the model's distribution (before temperature and filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the k most likely, best first


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled` has an entry for every sequence with a SamplePlan that did not fail.

    `guessed` has what was drawn behind guesses that were right: one token for each. Of the sequences `spoilt`
    by guesses that gave what is not finite nothing is of use: they are computed again, without guesses.
    """

    sampled: Mapping[int, ScoredToken]
    failed: Mapping[int, HeadraceError] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[ScoredToken, ...]] = field(default_factory=dict)
    guessed: Mapping[int, tuple[ScoredToken, ...]] = field(default_factory=dict)
    spoilt: frozenset[int] = frozenset()

"""The step under construction: which sequences compute how many tokens, within one token budget."""

from __future__ import annotations

from worker.engine.budget import StepLoad
from worker.engine.finishing import bans_stop_tokens
from worker.engine.plan import SamplePlan, SequencePlan, StepPlan
from worker.engine.request import Sequence

MOST_GUESSES = 64  # in a step: each takes a row of logits, as large as the vocabulary


class Chunks:
    """Grants tokens to sequences; `seal` turns the grants into a plan."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.left = num_tokens
        self._granted: dict[Sequence, int] = {}
        self._cut_short: dict[Sequence, None] = {}
        self._copies: dict[Sequence, tuple[int, int]] = {}
        self._guesses: dict[Sequence, list[int]] = {}

    def __len__(self) -> int:
        return len(self._granted)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._granted

    def grant(self, seq: Sequence, limit: int) -> int:
        """Grant what the sequence lacks, at most `limit` and what is left. Returns the tokens granted."""
        before = self._granted.get(seq, 0)
        lacking = seq.num_tokens + seq.sampling - seq.num_planned - before
        count = min(lacking, limit, self.left)
        if count > 0:
            self._granted[seq] = before + count
            self.left -= count
            if count < lacking:
                self._cut_short[seq] = None
        return count

    def decodes(self) -> list[Sequence]:
        """Sequences that compute their last token in this step, and no other."""
        return [seq for seq, n in self._granted.items() if n == 1 and seq.num_planned + 1 == seq.num_tokens]

    @property
    def guesses_left(self) -> int:
        return min(self.left, MOST_GUESSES - sum(map(len, self._guesses.values())))

    def guess(self, seq: Sequence, guesses: list[int]) -> None:
        """Have guesses computed behind the last token."""
        if guesses:
            self._guesses[seq] = guesses
            self.left -= len(guesses)

    def copy(self, seq: Sequence, copy: tuple[int, int] | None) -> None:
        if copy is not None:
            self._copies[seq] = copy

    def drop(self, seq: Sequence) -> None:
        """Take the sequence out of the step again: it was preempted."""
        self.left += self._granted.pop(seq, 0)
        self._cut_short.pop(seq, None)
        self._copies.pop(seq, None)

    def postpone(self, seq: Sequence) -> None:
        """Take back a chunk of a prompt: it comes last in this step, with what is left then."""
        if seq.num_tokens - seq.num_planned > 1 and seq in self._granted and seq not in self._copies:
            self.left += self._granted.pop(seq)
            self._cut_short[seq] = None

    def top_up(self) -> None:
        """Spend what is left on chunks that were cut short, in the order of granting."""
        for seq in list(self._cut_short) if self.left else ():
            self.grant(seq, self.left)

    def load(self) -> StepLoad:
        counts = ((s, n + len(self._guesses.get(s, ()))) for s, n in self._granted.items())
        reads = sum(n * (2 * seq.num_planned + n + 1) // 2 for seq, n in counts)
        return StepLoad(self.num_tokens - self.left, reads, len(self._granted))

    def seal(self, step: int) -> tuple[StepPlan, list[Sequence]]:
        """The plan and, in the same order, its sequences, which now count the tokens as planned."""
        parts = tuple(_part(s, n, step, self._guesses.get(s, [])) for s, n in self._granted.items())
        return StepPlan(step, parts, tuple(self._copies.values())), list(self._granted)


def _part(seq: Sequence, count: int, step: int, guesses: list[int]) -> SequencePlan:
    start, end = seq.num_planned, seq.num_planned + count
    if end > seq.num_tokens:
        return _pending_part(seq, step)
    seq.num_planned = end
    seq.last_step = step
    draws = end == seq.num_tokens and seq.max_tokens > 0
    seq.sampling += draws
    sample = _sample(seq) if draws else None
    token_ids = seq.tokens(start, end) + guesses
    if seq.scores is None:
        return SequencePlan(seq.seq_id, token_ids, start, seq.table, sample, num_guesses=len(guesses))
    following = seq.prompt_ids[end] if end < len(seq.prompt_ids) else None
    top = seq.group.request.params.prompt_logprobs
    return SequencePlan(seq.seq_id, token_ids, start, seq.table, sample, top, following)


def _pending_part(seq: Sequence, step: int) -> SequencePlan:
    """The token that the step before is drawing, and the draw behind it."""
    start, sample = seq.num_planned, _sample(seq).behind(1)
    seq.num_planned += 1
    seq.last_step = step
    seq.sampling += 1
    return SequencePlan(seq.seq_id, [0], start, seq.table, sample, pending=True)


def _sample(seq: Sequence) -> SamplePlan:
    request, output = seq.group.request, seq.output_ids
    banned = bans_stop_tokens(seq)
    return SamplePlan(request.params, request.seed, seq.choice, len(output), seq.prompt_ids, output, banned)

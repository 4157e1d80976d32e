"""What is let in: never what can't ever fit, and not so much that the running ones run out of blocks."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import HeadraceError
from worker.engine.blocks import BlockPool
from worker.engine.request import Request, Sequence

FIRST_GUESS = 0.7  # share of max_tokens that a choice uses, until some have ended
FORGETTING = 1 / 16  # least weight of the choice that ended last in this share
CAUTION = 4  # only 1/CAUTION of a choice's expected growth is reserved, and once more for each preemption:
# reserving all of it leaves a tenth of the blocks idle, none costs a third of the work in recomputation


def validate(request: Request) -> None:
    """Raises HeadraceError invalid_request for what no engine can run."""
    params = request.params
    if not request.prompt_ids:
        raise HeadraceError("invalid_request", "The prompt has no tokens.", "prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= 2**32:
        raise HeadraceError("invalid_request", "A token id is out of range.", "prompt_token_ids")
    if params.n < 1:
        raise HeadraceError("invalid_request", "n must be at least 1.", "n")
    if params.best_of is not None and params.best_of != params.n:
        raise HeadraceError("invalid_request", "best_of other than n is not supported.", "best_of")
    if params.max_tokens is not None and params.max_tokens < 0:
        raise HeadraceError("invalid_request", "max_tokens must not be negative.", "max_tokens")
    if len(request.resumed) > params.n or any(c >= params.n for c in request.finished_choices):
        raise HeadraceError("invalid_request", "The log has more choices than the request.", "n")


class Admission:
    """Capacity, and the growth to expect of what runs."""

    def __init__(self, pool: BlockPool, max_model_len: int) -> None:
        self._pool = pool
        self._max_model_len = max_model_len
        self._share = FIRST_GUESS
        self._ended = 0

    def max_tokens(self, request: Request) -> int:
        """The request's max_tokens bounded by the context. Raises HeadraceError if it can never run here."""
        prompt = len(request.prompt_ids)
        room = self._max_model_len - prompt
        if room < 1:
            message = (
                f"{prompt} prompt tokens leave no room to answer in the context of {self._max_model_len}."
            )
            raise HeadraceError("context_length_exceeded", message, "prompt")
        wanted = request.params.max_tokens
        bound = room if wanted is None else min(wanted, room)
        if self._pool.blocks_for(prompt + max(bound - 1, 0)) > self._pool.num_blocks:
            size = self._pool.num_blocks * self._pool.block_size
            message = f"{prompt} prompt and {bound} new tokens never fit the KV cache of {size} tokens."
            raise HeadraceError("capacity", message, "max_tokens" if prompt < size else "prompt")
        return bound

    def ended(self, seq: Sequence) -> None:
        """Learn from a choice that is complete how much of max_tokens is used."""
        if seq.max_tokens > 0:
            self._ended += 1
            weight = max(FORGETTING, 1 / (self._ended + 1))
            self._share += weight * (len(seq.output_ids) / seq.max_tokens - self._share)

    def reserve(self, seq: Sequence) -> float:
        """Tokens of growth to keep room for: a part of what the choice is expected to generate yet."""
        done = len(seq.output_ids)
        expected = max(self._share * seq.max_tokens - done, self._pool.block_size)
        return min(seq.max_tokens - done, expected * min(1.0, (seq.preemptions + 1) / CAUTION))

    def peak_blocks(
        self, running: Iterable[Sequence], used: int, candidate: Sequence | None = None, take: int = 0
    ) -> float:
        """The most blocks in use at one time if each choice ends after its reserve.

        `used` is what the running ones hold together now, `take` what the candidate starts with.

        After the "past-future" scheduler of LightLLM: only the moments when one ends can be the peak.
        """
        sizes = [(self.reserve(s), len(s.table)) for s in running]
        held = sum(blocks for _, blocks in sizes) or 1
        scale = used / held  # shared blocks count once
        ends = [(left, blocks * scale) for left, blocks in sizes]
        if candidate is not None:
            ends.append((self.reserve(candidate), take))
        ends.sort(reverse=True)
        peak = alive = 0.0
        for count, (left, blocks) in enumerate(ends, start=1):
            alive += blocks
            peak = max(peak, alive + count * left / self._pool.block_size)
        return peak

    def fits(self, seq: Sequence, take: int, running: Iterable[Sequence]) -> bool:
        """Whether its blocks are there now and the expected peak with it stays within the pool."""
        if take > self._pool.num_free:
            return False
        return self.peak_blocks(running, self._pool.num_used, seq, take) <= self._pool.num_blocks

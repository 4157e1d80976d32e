"""What one step computes, under one token budget: decodes, chunks of prompts, then who can be admitted."""

from __future__ import annotations

from worker.engine.admission import Admission
from worker.engine.ahead import allows_ahead, goes_on
from worker.engine.budget import Budget
from worker.engine.chunks import Chunks
from worker.engine.config import EngineConfig
from worker.engine.kv import Placement
from worker.engine.request import Sequence
from worker.engine.roster import Roster

PATIENT = 32  # places in the queue in which a sequence may wait for a prefix that is being computed
LOOKAHEAD = 4  # waiting sequences that do not fit and may be passed in one step
MARGIN = 1.1  # how much likelier than it would have to be a guess must be


class Planner:
    """Fills steps; moves sequences between waiting and running as it does."""

    def __init__(self, config: EngineConfig, roster: Roster, admission: Admission, budget: Budget) -> None:
        self._config = config
        self._roster = roster
        self._kv = roster.kv
        self._admission = admission
        self._budget = budget
        self.preemptions = 0

    def may_fill(self, in_flight: int) -> bool:
        """Whether a step may be planned now, with so many planned and not applied."""
        if not in_flight or not self._config.plan_ahead:
            return True
        return in_flight == 1 and all(map(allows_ahead, self._roster.running))

    def fill(self, now: float) -> Chunks:
        limits = self._budget.limits()
        ahead = self._config.plan_ahead
        ready = [
            s
            for s in self._roster.running
            if (ahead and goes_on(s) if s.sampling else s.num_planned < s.num_tokens)
        ]
        prefills = [s for s in ready if s.num_tokens - s.num_planned > 1]
        chunks = Chunks(limits.num_tokens if len(prefills) < len(ready) else limits.prompt_tokens)
        self._serve_running(chunks, ready, prefills)
        if len(self._roster.waiting):
            self._admit(chunks, limits.num_seqs, now)
        chunks.top_up()
        if self._config.speculative_tokens:
            self._guess(chunks, limits.fixed_tokens)
        return chunks

    def _serve_running(self, chunks: Chunks, ready: list[Sequence], prefills: list[Sequence]) -> None:
        decodes = len(ready) - len(prefills)
        if decodes + bool(prefills) > chunks.left:
            self._rotate(ready, chunks)
            return
        for seq in ready:
            if seq.num_tokens - seq.num_planned <= 1 and self._grow(seq, chunks):
                chunks.grant(seq, 1)
        company = len(prefills) > 1 or len(self._roster.waiting) > 0
        for seq in prefills:
            if seq.table:
                chunks.grant(seq, self._chunk_limit(seq, chunks, company))

    def _rotate(self, ready: list[Sequence], chunks: Chunks) -> None:
        """The budget is short: whoever was served least recently goes first, with an eighth of it at most."""
        for seq in sorted(ready, key=lambda s: (s.last_step, s.key)):
            if not chunks.left:
                return
            if self._grow(seq, chunks):
                chunks.grant(seq, max(1, chunks.num_tokens // 8))

    def _chunk_limit(self, seq: Sequence, chunks: Chunks, company: bool) -> int:
        """A prompt longer than a whole step leaves half to others: short ones need not wait for its end."""
        long = seq.num_tokens - seq.num_planned > chunks.num_tokens
        return max(1, chunks.left // 2) if long and company else chunks.left

    def _grow(self, seq: Sequence, chunks: Chunks) -> bool:
        """Get the block for the next position, by preemption if need be. False: it was preempted itself.

        Nobody is preempted for a token that is still being drawn, which may be the last: False then, too.
        """
        pool = self._kv.pool
        while seq.table and seq.num_planned >= len(seq.table) * pool.block_size:
            if pool.num_free:
                self._kv.grow(seq)
            elif seq.sampling:
                return False
            else:
                self._preempt(self._latest(), chunks)
        return bool(seq.table)

    def _latest(self) -> Sequence:
        """The victim when blocks run out: the last in order that is not protected."""
        running = self._roster.running
        return next((s for s in reversed(running) if not self._is_protected(s)), running[-1])

    def _preempt(self, seq: Sequence, chunks: Chunks) -> None:
        chunks.drop(seq)
        self._roster.preempt(seq)
        self.preemptions += 1

    def _is_protected(self, seq: Sequence) -> bool:
        return seq.preemptions >= self._config.max_preemptions

    def _admit(self, chunks: Chunks, num_seqs: int, now: float) -> None:
        roster = self._roster
        arrivals = (s.group.request.arrival_s for s in roster.waiting)
        quota = roster.gate.quota(now, len(roster.running), roster.num_waiting, arrivals)
        index = 0
        blocked: list[Sequence] = []
        while quota > 0 and index < len(roster.waiting) and len(blocked) < LOOKAHEAD:
            seq = roster.waiting[index]
            full = len(roster.running) >= num_seqs
            if index < PATIENT and not full and self._is_better_later(seq):
                index += 1
                continue
            where = self._make_room(seq, full, chunks) if full or self._has_tokens(seq, chunks) else None
            if where is None:
                if seq.passed >= self._config.max_passes:
                    return
                blocked.append(seq)
                index += 1
                continue
            self._start(seq, where, chunks)
            quota -= 1
            for other in blocked:
                other.passed += 1

    def _has_tokens(self, seq: Sequence, chunks: Chunks) -> bool:
        """Whether anything is left of the step; chunks of lower classes' prompts give way as needed."""
        for other in reversed(self._roster.running):
            if chunks.left >= seq.num_tokens:
                break
            if other.group.request.priority > seq.group.request.priority and other.key > seq.key:
                chunks.postpone(other)
        return chunks.left > 0

    def _is_better_later(self, seq: Sequence) -> bool:
        """Whether a running sequence is computing a good part of this prompt: soon it is a prefix hit."""
        least = self._config.prefix_wait_tokens
        return 0 < least <= self._kv.find(seq).coming_tokens

    def _start(self, seq: Sequence, where: Placement, chunks: Chunks) -> None:
        chunks.copy(seq, self._roster.admit(seq, where))
        chunks.grant(seq, self._chunk_limit(seq, chunks, len(self._roster.waiting) > 0))

    def _guess(self, chunks: Chunks, fixed_tokens: float) -> None:
        """Guesses behind decodes, where a row more is expected to spare more than it takes."""
        rows = chunks.num_tokens - chunks.left
        # Each row makes a token: one more must promise its share of the step, and a little for doubt.
        least = min(MARGIN * rows / (rows + fixed_tokens), 1.0)
        for seq in chunks.decodes() if fixed_tokens else ():
            if seq.draft is not None and seq.scores is None:
                room = min(chunks.guesses_left, seq.max_tokens - len(seq.output_ids) - 1)
                most = min(self._config.speculative_tokens, room)
                guesses = seq.draft.guess(seq, seq.draft.worth(least, most))
                chunks.guess(seq, guesses[: self._slots_behind(seq, len(guesses))])

    def _slots_behind(self, seq: Sequence, wanted: int) -> int:
        """Slots behind the last token; a block is taken early for them where nobody will want it soon."""
        pool = self._kv.pool
        free = len(seq.table) * pool.block_size - seq.num_planned - 1
        if free < wanted and pool.num_free > len(self._roster.running):
            self._kv.grow(seq)
            free += pool.block_size
        return free

    def _make_room(self, seq: Sequence, full: bool, chunks: Chunks) -> Placement | None:
        """A placement that fits, if need be after preempting sequences of a lower class; or None."""
        if not full:
            where = self._kv.find(seq)
            if self._fits(seq, where):
                return where
        victims = self._victims(seq, chunks)
        if not victims or not self._would_fit(seq, victims):
            return None
        for victim in victims:
            self._preempt(victim, chunks)
            where = self._kv.find(seq)
            if self._fits(seq, where):
                return where
        return None

    def _victims(self, seq: Sequence, chunks: Chunks) -> list[Sequence]:
        """Running sequences of a strictly lower class that also rank behind it, the last in order first.

        When the step is full only those that give back a part of it are of use.
        """
        level = seq.group.request.priority
        lower = [
            s
            for s in reversed(self._roster.running)
            if s.group.request.priority > level and s.key > seq.key and not self._is_protected(s)
        ]
        return lower if chunks.left else [s for s in lower if s in chunks]

    def _would_fit(self, seq: Sequence, victims: list[Sequence]) -> bool:
        """Whether the sequence fits once all victims are gone, as far as can be told."""
        pool = self._kv.pool
        gone = set(victims)
        rest = [s for s in self._roster.running if s not in gone]
        freed = self._kv.freed_by(victims)
        take = self._kv.find(seq).take
        if take > pool.num_free + freed:
            return False
        if not rest:
            return True
        return self._admission.peak_blocks(rest, pool.num_used - freed, seq, take) <= pool.num_blocks

    def _fits(self, seq: Sequence, where: Placement) -> bool:
        running = self._roster.running
        if not len(running):
            return where.take <= self._kv.pool.num_free
        return self._admission.fits(seq, where.take, running)

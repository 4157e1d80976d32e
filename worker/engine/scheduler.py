"""The scheduler: owns what waits and what runs, and decides each step.

There are no phases. Every step has one token budget; sequences that lack one token (decodes) come first,
then chunks of those that lack more, in the order of rank, then waiting ones are admitted. `plan` may be
called again before `apply` of the plan before it: a sequence whose next token is being drawn is left out
until it is known, or with `plan_ahead` goes on unseen, and results of sequences that were completed, aborted
or preempted meanwhile are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.errors import HeadraceError
from worker.engine.adaptive import make_budget
from worker.engine.admission import Admission, validate
from worker.engine.batching import make_gate
from worker.engine.blocks import BlockPool
from worker.engine.budget import Budget, StepLoad
from worker.engine.config import EngineConfig
from worker.engine.deadlines import Deadlines
from worker.engine.drafts import Draft, may_guess
from worker.engine.finishing import finish_of
from worker.engine.kv import KvManager
from worker.engine.outputs import FailedOutput, Finish, FinishedOutput, Output, TokenOutput
from worker.engine.plan import ScoredToken, SequencePlan, StepPlan, StepResult
from worker.engine.planner import Planner
from worker.engine.policy import rank
from worker.engine.prefix import PrefixCache
from worker.engine.request import Group, Request, Sequence
from worker.engine.roster import Roster
from worker.engine.stats import Counters, EngineStats

DISPLACED_STEPS = 64  # behind a higher class, until a request counts as displaced


class Scheduler:
    """Pure bookkeeping: no clock, no tensor, no I/O. Outputs pile up until `take_outputs`."""

    def __init__(self, config: EngineConfig, budget: Budget | None = None) -> None:
        self.config = config
        self.budget = budget or make_budget(config)
        self.pool = BlockPool(config.num_blocks, config.block_size)
        prefix = PrefixCache(self.pool, enabled=config.prefix_cache, hash_bytes=config.prefix_hash_bytes)
        self.kv = KvManager(self.pool, prefix)
        gate = make_gate(config.batching, config.max_num_seqs, config.batch_wait_s)
        self.roster = Roster(self.kv, gate)
        self.admission = Admission(self.pool, config.max_model_len)
        self._planner = Planner(config, self.roster, self.admission, self.budget)
        self._counters = Counters()
        self._outputs: list[Output] = []
        self._in_flight: dict[int, tuple[list[tuple[Sequence, int]], StepLoad]] = {}
        self._deadlines = Deadlines()
        self._last_load = StepLoad(0, 0, 0)
        self._step = self._order = self._last_seq_id = self._step_used = 0

    @property
    def has_work(self) -> bool:
        return bool(self.roster.groups or self._outputs or self.roster.released)

    def add(self, request: Request) -> None:
        """Raises HeadraceError: invalid_request, conflict, context_length_exceeded or capacity."""
        if request.request_id in self.roster.groups:
            raise HeadraceError("conflict", "A request with this id is running.", "id")
        validate(request)
        max_tokens = self.admission.max_tokens(request)
        self._order += 1
        group = Group(request, rank(request, self.config.policy, self.config.ageing_s), self._order)
        group.score_prompt = _wants_scores(request)
        for choice in range(request.params.n):
            if choice not in request.finished_choices:
                self._add_choice(group, choice, max_tokens)
        if group.live:
            self.roster.enter(group)
            self._deadlines.add(group)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without output. An unknown one is no error."""
        group = self.roster.groups.get(request_id)
        if group is None:
            return
        if choice is None:
            self._counters.aborted_requests += 1
            self.roster.leave_all(group)
            return
        for seq in [s for s in group.live if s.choice == choice]:
            self.admission.ended(seq)
            self.roster.leave(seq)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. `now` is on the clock of the requests."""
        self._expire(now)
        if not self._planner.may_fill(len(self._in_flight)):
            return None
        chunks = self._planner.fill(now)
        if not len(chunks):
            return None
        load = chunks.load()
        plan, sequences = chunks.seal(self._step)
        self._step_used = self.pool.num_used
        self._in_flight[plan.step] = ([(seq, seq.epoch) for seq in sequences], load)
        self._step += 1
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now: float, duration_s: float | None = None) -> None:
        """Take in what a plan gave. Plans are applied in the order in which they were made."""
        flight, self._last_load = self._in_flight.pop(plan.step)
        for (seq, epoch), part in zip(flight, plan.sequences, strict=True):
            if seq.epoch != epoch:
                self._counters.dropped_results += 1
            elif seq.seq_id in result.failed:
                self._fail(seq.group, result.failed[seq.seq_id])
            elif seq.seq_id in result.spoilt:
                seq.draft = None
                self.roster.preempt(seq)
            else:
                self._advance(seq, part, plan.step, result)
                self._counters.last_progress_s = now
                self._counters.last_progress_step = plan.step
        if duration_s is not None:
            self.budget.observe(self._last_load, duration_s)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_released(self) -> list[int]:
        """Ids of sequences that have left, or were preempted, since the last call."""
        released, self.roster.released = self.roster.released, []
        return released

    def wake_at(self) -> float | None:
        """When something changes by time alone: a waiting batch starts, or a deadline passes."""
        roster = self.roster
        gate = roster.gate.wake_at(len(roster.running), roster.num_waiting, self._arrivals())
        return min((t for t in (gate, self._deadlines.next_s()) if t is not None), default=None)

    def admissible(self, priority: int = 2) -> tuple[int, int]:
        """Sequences of this class that could start now, lower ones giving way, and the KV tokens for them."""
        roster = self.roster
        if roster.gate.is_shut(len(roster.running)):
            return 0, 0
        lower = [s for s in roster.running if s.group.request.priority > priority]
        taken = roster.gate.slots(len(roster.running)) + roster.num_waiting - len(lower)
        taken -= sum(seq.group.request.priority > priority for seq in roster.waiting)
        slots = min(self.config.max_num_seqs, self.budget.limits().num_seqs) - taken
        kept = [s for s in roster.running if s.group.request.priority <= priority]
        wanted = sum(self.pool.blocks_for(seq.num_tokens) for seq in roster.waiting)
        used = self.pool.num_used - self.kv.freed_by(lower)
        blocks = self.pool.num_blocks - self.admission.peak_blocks(kept, used) - wanted
        return max(0, slots), max(0, int(blocks) * self.pool.block_size)

    def displaced(self) -> tuple[str, ...]:
        """Requests that gave their places to higher classes and wait behind them: they could go on elsewhere.

        Asked for after every step, so the usual answer costs nothing.
        """
        if not self._planner.preemptions or not len(self.roster.waiting):
            return ()
        lowest = max((seq.group.request.priority for seq in self.roster.running), default=None)
        if lowest is None:
            return ()
        since = self._step - DISPLACED_STEPS
        found = [
            seq.group.request
            for seq in self.roster.waiting
            if seq.preemptions and seq.last_step < since and seq.group.request.priority > lowest
        ]
        return tuple(dict.fromkeys(request.request_id for request in found))

    def stats(self) -> EngineStats:
        roster, pool = self.roster, self.pool
        limits, counters = self.budget.limits(), self._counters
        used = self._step_used if len(roster.running) else pool.num_used
        return EngineStats(
            step=self._step - len(self._in_flight),
            running=len(roster.running),
            waiting=roster.num_waiting,
            slots_used=roster.gate.slots(len(roster.running)),
            max_num_seqs=self.config.max_num_seqs,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=self.kv.prefix.num_cached,
            kv_utilisation=used / pool.num_blocks,
            token_budget=limits.num_tokens,
            seq_budget=limits.num_seqs,
            budget_reason=self.budget.explain(),
            last_step_tokens=self._last_load.num_tokens,
            last_step_seqs=self._last_load.num_seqs,
            prefix_queried_tokens=self.kv.queried_tokens,
            prefix_hit_tokens=self.kv.hit_tokens,
            preemptions=self._planner.preemptions,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            guessed_tokens=counters.guessed_tokens,
            right_guesses=counters.right_guesses,
            finished_choices=counters.finished_choices,
            failed_requests=counters.failed_requests,
            aborted_requests=counters.aborted_requests,
            dropped_results=counters.dropped_results,
            last_progress_s=counters.last_progress_s,
            last_progress_step=counters.last_progress_step,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if any block is lost, held twice by mistake, or wrongly cached."""
        self.kv.check_integrity(self._sequences())
        if not self.roster.groups and self.pool.num_used:
            raise RuntimeError(f"{self.pool.num_used} blocks are in use by nobody")

    def _sequences(self) -> Iterator[Sequence]:
        return (seq for group in self.roster.groups.values() for seq in group.live)

    def _arrivals(self) -> Iterator[float]:
        return (seq.group.request.arrival_s for seq in self.roster.waiting)

    def _add_choice(self, group: Group, choice: int, max_tokens: int) -> None:
        request = group.request
        output_ids = list(request.resumed[choice]) if choice < len(request.resumed) else []
        self._last_seq_id += 1
        seq = Sequence(self._last_seq_id, group, choice, request.prompt_ids, output_ids, max_tokens)
        if self.config.speculative_tokens and may_guess(request.params):
            seq.draft = Draft()
        finish, stop_token = finish_of(seq)
        if finish is None or (group.score_prompt and not group.live):
            group.live.append(seq)
        else:
            self._outputs.append(FinishedOutput(request.request_id, choice, finish, stop_token))

    def _expire(self, now: float) -> None:
        while (group := self._deadlines.pop_due(now)) is not None:
            self._fail(group, HeadraceError("deadline_exceeded"))

    def _fail(self, group: Group, error: HeadraceError) -> None:
        self._counters.failed_requests += 1
        self.roster.leave_all(group)
        self._outputs.append(FailedOutput(group.request.request_id, error))

    def _advance(self, seq: Sequence, part: SequencePlan, step: int, result: StepResult) -> None:
        group = seq.group
        seq.num_computed += len(part.token_ids) - part.num_guesses
        self._counters.computed_tokens += len(part.token_ids)
        self.kv.publish(seq)
        if seq.scores is not None:
            seq.scores.extend(result.prompt_logprobs.get(seq.seq_id, ()))
        if not group.prompt_done and seq.num_computed >= len(seq.prompt_ids):
            self.roster.prompt_done(group)
        if part.sample is not None:
            self._take_tokens(seq, part, result, step)
        elif seq.max_tokens == 0 and seq.num_computed == seq.num_tokens:
            self._end_scoring(seq)

    def _take_tokens(self, seq: Sequence, part: SequencePlan, result: StepResult, step: int) -> None:
        scored = result.sampled.get(seq.seq_id)
        if scored is None:
            self._fail(seq.group, HeadraceError("internal", "The step gave no token for a sequence."))
            return
        seq.sampling -= 1
        behind = result.guessed.get(seq.seq_id, ())
        self._judge(seq, part.num_guesses, len(behind))
        if any(self._take_token(seq, token, step) for token in (scored, *behind)):
            return
        if behind:
            seq.num_computed += len(behind)
            seq.num_planned = seq.num_computed
            self.kv.publish(seq)

    def _judge(self, seq: Sequence, guessed: int, right: int) -> None:
        if seq.draft is not None and guessed:
            seq.draft.judge(guessed, right)
            self._counters.guessed_tokens += guessed
            self._counters.right_guesses += right

    def _take_token(self, seq: Sequence, scored: ScoredToken, step: int) -> bool:
        """Whether it was the last."""
        seq.append(scored.token_id)
        self._counters.generated_tokens += 1
        finish, stop_token = finish_of(seq)
        self._outputs.append(self._token_output(seq, scored, finish, stop_token, step))
        if finish is not None:
            self._complete(seq)
        return finish is not None

    def _token_output(
        self, seq: Sequence, scored: ScoredToken, finish: Finish | None, stop_token: int | None, step: int
    ) -> TokenOutput:
        group = seq.group
        cached, scores = group.cached_tokens or 0, seq.take_scores()
        request_id, choice, token_id = group.request.request_id, seq.choice, scored.token_id
        return TokenOutput(request_id, choice, token_id, scored, finish, stop_token, cached, scores, step)

    def _end_scoring(self, seq: Sequence) -> None:
        request_id, scores = seq.group.request.request_id, seq.take_scores()
        self._outputs.append(FinishedOutput(request_id, seq.choice, "length", prompt_logprobs=scores))
        self._complete(seq)

    def _complete(self, seq: Sequence) -> None:
        self._counters.finished_choices += 1
        self.admission.ended(seq)
        self.roster.leave(seq)


def _wants_scores(request: Request) -> bool:
    """Prompt log-probabilities go out with the first token: a log that has one has them."""
    begun = any(request.resumed) or bool(request.finished_choices)
    return request.params.prompt_logprobs is not None and not begun

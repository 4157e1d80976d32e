"""Running a plan so that one bad sequence fails alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headrace.errors import HeadraceError
from worker.engine.plan import ScoredToken, SequencePlan, StepPlan, StepResult

RunPlan = Callable[[StepPlan], StepResult]


def run_isolated(run: RunPlan, plan: StepPlan) -> StepResult:
    """Run the plan; if it raises, find the culprits by halving and run the others without them.

    A single sequence that raises by itself fails with its HeadraceError or `internal`. At most 8 *
    log2(n) + 24 runs are spent (enough for any number of culprits among 32); what is not settled by then
    fails as well.
    """
    try:
        return run(plan)
    except Exception as error:
        return _Bisection(run, plan).settle(error)


class _Bisection:
    def __init__(self, run: RunPlan, plan: StepPlan) -> None:
        self._run = run
        self._plan = plan
        self._runs_left = 8 * len(plan.sequences).bit_length() + 16
        self._sampled: dict[int, ScoredToken] = {}
        self._failed: dict[int, HeadraceError] = {}
        self._scores: dict[int, tuple[ScoredToken, ...]] = {}
        self._guessed: dict[int, tuple[ScoredToken, ...]] = {}
        self._spoilt: frozenset[int] = frozenset()

    def settle(self, error: Exception) -> StepResult:
        self._split(self._plan.sequences, error)
        return StepResult(self._sampled, self._failed, self._scores, self._guessed, self._spoilt)

    def _split(self, parts: tuple[SequencePlan, ...], error: Exception) -> None:
        if len(parts) == 1 or self._runs_left <= 0:
            self._failed.update((part.seq_id, _as_failure(error)) for part in parts)
            return
        middle = len(parts) // 2
        for half in (parts[:middle], parts[middle:]):
            self._try(half, error)

    def _try(self, parts: tuple[SequencePlan, ...], error: Exception) -> None:
        if self._runs_left <= 0:
            self._split(parts, error)
            return
        self._runs_left -= 1
        try:
            result = self._run(self._part_of_plan(parts))
        except Exception as again:
            self._split(parts, again)
            return
        self._sampled.update(result.sampled)
        self._failed.update(result.failed)
        self._scores.update(result.prompt_logprobs)
        self._guessed.update(result.guessed)
        self._spoilt |= result.spoilt

    def _part_of_plan(self, parts: tuple[SequencePlan, ...]) -> StepPlan:
        blocks = {block for part in parts for block in part.block_table}
        copies = tuple(copy for copy in self._plan.block_copies if copy[1] in blocks)
        return replace(self._plan, sequences=parts, block_copies=copies)


def _as_failure(error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    failure = HeadraceError("internal", f"The model's step failed: {type(error).__name__}.")
    failure.__cause__ = error
    return failure

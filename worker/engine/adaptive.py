"""Choosing the tokens and sequences of a step from what steps have taken so far.

With a target the largest step that is expected to keep it is chosen, or where none does, the one that spends
half its time on tokens; without a target, the smallest step that gives `EFFICIENCY` of the best throughput
(fixed cost spread over enough tokens). A step in which nobody waits for a next token may always have all
the tokens that are configured: a target is about the time between tokens. Against oscillation:
proposals within `DEADBAND` of what is in force change nothing, and a change goes at most by `STRIDE` every
`PATIENCE` steps.
"""

from __future__ import annotations

from worker.engine.budget import Budget, FixedBudget, Limits, StepLoad
from worker.engine.config import EngineConfig
from worker.engine.steptime import StepTimeModel

EFFICIENCY = 0.95
DEADBAND = 0.1
STRIDE = 1.5
PATIENCE = 4
WARM_UP = 8  # steps before the first change
SMOOTHING = 0.1  # of the keys read for each token
MIN_TOKENS = 16  # never less for a step, whatever its measured time
FIRST_TOKENS = 64  # with a target: nothing is known yet, and one step that is too large has missed it
PREFILL_SHARE = 8  # sequences leave an eighth of the step to prompts,
PREFILL_TOKENS = 8  # and of a small step so many tokens, or half


def make_budget(config: EngineConfig) -> Budget:
    if not config.adaptive:
        return FixedBudget(config.max_num_batched_tokens, config.max_num_seqs)
    target_s = None if config.target_itl_ms is None else config.target_itl_ms / 1e3
    return AdaptiveBudget(config.max_num_batched_tokens, config.max_num_seqs, target_s)


class AdaptiveBudget:
    """Bounds that follow a step-time model; never above the configured maxima."""

    def __init__(self, max_num_tokens: int, max_num_seqs: int, target_s: float | None) -> None:
        self.model = StepTimeModel()
        self._max_tokens = max_num_tokens
        self._max_seqs = max_num_seqs
        self._target_s = target_s
        self._floor = min(MIN_TOKENS, max_num_tokens)
        self._num_tokens = max_num_tokens if target_s is None else min(FIRST_TOKENS, max_num_tokens)
        self._keys_per_token = 0.0
        self._since_change = 0

    def limits(self) -> Limits:
        prompt_tokens = self._num_tokens if self._target_s is None else self._max_tokens
        known = self.model.num_observed >= WARM_UP
        fixed_tokens = self.model.base_s / max(self._slope_s(), 1e-9) if known else 0.0
        return Limits(self._num_tokens, self._seqs_for(self._num_tokens), prompt_tokens, fixed_tokens)

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """Learn from one step and, now and then, move the budget."""
        if load.num_tokens == 0:
            return
        self.model.observe(load, duration_s)
        self._keys_per_token += SMOOTHING * (load.kv_read / load.num_tokens - self._keys_per_token)
        self._since_change += 1
        if self.model.num_observed >= WARM_UP and self._since_change >= PATIENCE:
            self._move(self._proposal())

    def explain(self) -> str:
        """The choice in one line, for logs and metrics."""
        limits, base_ms, slope_ms = self.limits(), self.model.base_s * 1e3, self._slope_s() * 1e3
        goal = "throughput" if self._target_s is None else f"{self._target_s * 1e3:.0f} ms a step"
        return (
            f"{goal}: {limits.num_tokens} tokens, {limits.num_seqs} sequences, "
            f"from {base_ms:.2f} ms + {slope_ms:.4f} ms a token at {self._keys_per_token:.0f} keys each"
        )

    def _proposal(self) -> float:
        slope_s = max(self._slope_s(), 1e-9)
        if self._target_s is None:
            return EFFICIENCY / (1 - EFFICIENCY) * self.model.base_s / slope_s
        return max(self._target_s - self.model.base_s, self.model.base_s) / slope_s

    def _slope_s(self) -> float:
        """Seconds for one more token that reads as many keys as tokens do at present."""
        return self.model.token_s + self.model.key_s * self._keys_per_token

    def _move(self, wanted: float) -> None:
        now = self._num_tokens
        wanted = min(max(wanted, self._floor), self._max_tokens)
        if abs(wanted - now) <= DEADBAND * now and wanted != self._max_tokens:
            return
        bounded = min(max(wanted, now / STRIDE), now * STRIDE)
        self._num_tokens = max(self._floor, min(self._max_tokens, round(bounded)))
        self._since_change = 0

    def _seqs_for(self, num_tokens: int) -> int:
        """Each running sequence wants a token a step: no more than the step holds beside prompts."""
        prompts = max(num_tokens // PREFILL_SHARE, min(PREFILL_TOKENS, num_tokens // 2))
        return max(1, min(self._max_seqs, num_tokens - prompts))

"""The engine's numbers, for metrics and health."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start, kept by the scheduler."""

    computed_tokens: int = 0
    generated_tokens: int = 0
    guessed_tokens: int = 0
    right_guesses: int = 0
    finished_choices: int = 0
    failed_requests: int = 0
    aborted_requests: int = 0
    dropped_results: int = 0
    last_progress_s: float = 0.0
    last_progress_step: int = -1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One reading. Sequences are choices; utilisations are 0 to 1.

    No progress for longer than a step can take while there is work (and, in static and dynamic batching,
    `wake_at` has passed) means that the engine is stuck.
    """

    step: int  # steps applied
    running: int
    waiting: int
    slots_used: int
    max_num_seqs: int
    num_blocks: int
    free_blocks: int  # cached ones included
    cached_blocks: int  # findable, in use or free
    kv_utilisation: float  # while the last step ran
    token_budget: int
    seq_budget: int
    budget_reason: str
    last_step_tokens: int
    last_step_seqs: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    computed_tokens: int
    generated_tokens: int
    guessed_tokens: int  # rows of guesses computed
    right_guesses: int  # of them: each a token without a step of its own
    preemptions: int
    finished_choices: int
    failed_requests: int
    aborted_requests: int
    dropped_results: int  # of sequences that were completed, aborted or preempted while in flight
    last_progress_s: float  # engine's clock
    last_progress_step: int

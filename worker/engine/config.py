"""The engine's settings. Frozen; a wrong value is a ValueError that names it."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.batching import MODES
from worker.engine.policy import POLICIES


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes are in tokens, blocks or sequences (one choice each); times in seconds on the engine's clock."""

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    batching: str = "continuous"  # or static, dynamic: see batching.py
    batch_wait_s: float = 1.0  # static and dynamic: the longest the oldest waits for company
    policy: str = "fcfs"  # or shortest-first, deadline: see policy.py
    ageing_s: float = 30.0  # waiting that is worth one class
    prefix_cache: bool = True
    prefix_hash_bytes: int = 32  # fewer only to test that collisions do no harm
    prefix_wait_tokens: int = (
        64  # wait for a prefix of this length that a running sequence computes; 0: never
    )
    max_preemptions: int = 3  # after that a sequence keeps its blocks
    max_passes: int = 64  # times later ones may be admitted before one that does not fit
    adaptive: bool = False  # choose tokens and sequences of a step from measured step times: see budget.py
    target_itl_ms: float | None = None  # adaptive: longest wanted step; None: throughput
    speculative_tokens: int = 0  # most guesses a sequence and step: see drafts.py
    plan_ahead: bool = False  # plan a step while the one before it is computed: see ahead.py

    def __post_init__(self) -> None:
        counts = ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        for name in (*counts, "max_preemptions", "max_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.batching not in MODES:
            raise ValueError(f"batching={self.batching!r} is none of {', '.join(MODES)}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is none of {', '.join(POLICIES)}")
        if not 1 <= self.prefix_hash_bytes <= 32:
            raise ValueError(f"prefix_hash_bytes={self.prefix_hash_bytes} must be 1 to 32")
        if self.speculative_tokens < 0:
            raise ValueError(f"speculative_tokens={self.speculative_tokens} must not be negative")
        if self.plan_ahead and self.speculative_tokens:
            raise ValueError(f"speculative_tokens={self.speculative_tokens} must be 0 with plan_ahead")
        if self.ageing_s <= 0 or self.batch_wait_s < 0:
            raise ValueError(f"ageing_s={self.ageing_s}, batch_wait_s={self.batch_wait_s} must be positive")

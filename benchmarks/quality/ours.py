"""Our own logits over given tokens: the worker's model as settings make it, its chunks and its KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headrace.config import WorkerSettings, load_settings
from worker.build import build
from worker.engine.plan import SequencePlan, StepPlan
from worker.model.inputs import build_inputs
from worker.model.runner import ModelRunner

CHUNK_TOKENS = 256  # a worker's default budget of a step


def make_runner(settings: Mapping[str, str | int], window_tokens: int) -> ModelRunner:
    """A worker's runner with room for one window. Raises ModelError, ConfigError."""
    loaded = load_settings(WorkerSettings, {}, {"device": "cpu", "num_kv_blocks": 1, **settings})
    blocks = -(-window_tokens // loaded.block_size) + 1
    runner = build(load_settings(WorkerSettings, {}, {"device": "cpu", **settings, "num_kv_blocks": blocks}))
    assert isinstance(runner.engine.runner, ModelRunner)
    return runner.engine.runner


def window_logits(runner: ModelRunner, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """For each window the logits of positions len // 2 to len - 2, [rows, vocabulary] fp32."""
    for window in windows:
        yield _logits(runner, window, len(window) // 2)


@torch.inference_mode()
def _logits(runner: ModelRunner, window: Sequence[int], first: int) -> Tensor:
    block_size = runner.kv.block_size
    table = range(-(-len(window) // block_size))
    parts = []
    for start in range(0, len(window), CHUNK_TOKENS):
        ids = window[start : start + CHUNK_TOKENS]
        inputs = build_inputs(StepPlan(0, (SequencePlan(0, ids, start, table, None),)), block_size)
        last = min(len(ids), len(window) - 1 - start)
        wanted = torch.arange(min(max(first - start, 0), last), last)
        logits = runner.forward.logits(inputs, runner.kv, wanted)
        parts.append(logits[:, : runner.sampler.vocab_size].float().clone())
    return torch.cat(parts)

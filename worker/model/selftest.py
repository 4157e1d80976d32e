"""Checks made at load: does the packed model agree with plain transformers, and with itself in a crowd?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from headrace.messages import SamplingParams
from worker.engine.plan import SamplePlan, SequencePlan, StepPlan
from worker.model.inputs import StepInputs, build_inputs
from worker.model.kv import KVCache, LayerShape
from worker.model.threads import torch_threads

log = structlog.get_logger()
BLOCK_SIZE = 16
LENGTHS = (24, 7)
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}  # of the largest logit
KV_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.int8: 8e-2, torch.float8_e4m3fn: 0.2}
LOSSY_TOLERANCE = 0.3  # tells a coarse model from a wrong one


class Forward(Protocol):
    """A model that runs steps: PackedModel, FusedModel, TritonModel."""

    way: str

    @property
    def layers(self) -> tuple[LayerShape, ...]: ...

    def logits(self, inputs: StepInputs, kv: KVCache, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts and the last logits [vocab] that plain transformers gives each of them, alone."""

    prompts: tuple[list[int], ...]
    logits: tuple[Tensor, ...]


@torch.inference_mode()
def make_reference(model: Any, vocab_size: int, max_len: int, device: torch.device) -> Reference:
    """Run before anything in the model is replaced."""
    generator = torch.Generator().manual_seed(20)
    prompts = tuple(
        torch.randint(vocab_size, (min(length, max_len),), generator=generator).tolist() for length in LENGTHS
    )
    return Reference(prompts, tuple(_plain_logits(model, prompt, device) for prompt in prompts))


def _plain_logits(model: Any, prompt: list[int], device: torch.device) -> Tensor:
    ids = torch.tensor([prompt], device=device)
    positions = torch.arange(len(prompt), device=device)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -1].float()


def tolerance(arithmetic: torch.dtype, kv_dtype: torch.dtype, *, lossy: bool = False) -> float:
    """How far from transformers' logits rounding may take ours, as a share of the largest.

    `lossy`: weights or activations are coarser than the checkpoint's.
    """
    return max(TOLERANCE[arithmetic], KV_TOLERANCE.get(kv_dtype, 0.0), LOSSY_TOLERANCE if lossy else 0.0)


def passes(
    forward: Forward,
    reference: Reference,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    allowed: float,
    threads: int,
) -> bool:
    """Whether a crowded step gives the reference's logits within `allowed`, and the bits of one alone."""
    kv = self_test_cache(forward, kv_dtype, device)
    crowd = crowded_logits(forward, reference.prompts, kv)
    error = disagreement(crowd, reference)
    if error <= allowed and bits_agree(forward, reference.prompts, kv, crowd, threads):
        return True
    log.warning("not_fused", reason="it differs from transformers", error=error)
    return False


def disagreement(crowd: list[Tensor], reference: Reference) -> float:
    """The largest difference of logits to the reference, relative to its largest logit."""
    worst = 0.0
    for ours, theirs in zip(crowd, reference.logits, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        worst = max(worst, float((ours - theirs).abs().nan_to_num(torch.inf).max()) / scale)
    return worst


@torch.inference_mode()
def bits_agree(
    forward: Forward, prompts: Sequence[list[int]], kv: KVCache, crowd: list[Tensor], threads: int
) -> bool:
    """Whether each prompt alone and whole gives, on `threads`, the bits it gave in chunks amid others."""
    for i, prompt in enumerate(prompts):
        with torch_threads(threads):
            alone = _run(forward, kv, [(i, prompt, 0)])
        if not torch.equal(alone[i], crowd[i]):
            return False
    return True


def self_test_cache(forward: Forward, kv_dtype: torch.dtype, device: torch.device) -> KVCache:
    return KVCache(forward.layers, 3 * len(LENGTHS), BLOCK_SIZE, kv_dtype, device)


@torch.inference_mode()
def crowded_logits(forward: Forward, prompts: Sequence[list[int]], kv: KVCache) -> list[Tensor]:
    """The last logits of each prompt after three steps beside the others: a half, the rest, a decode."""
    cuts = [(0, len(p) // 2, len(p) - 1, len(p)) for p in prompts]
    last: dict[int, Tensor] = {}
    for step in range(3):
        parts = [(i, p[cuts[i][step] : cuts[i][step + 1]], cuts[i][step]) for i, p in enumerate(prompts)]
        last.update(_run(forward, kv, [part for part in parts if part[1]]))
    return [last[i] for i in range(len(prompts))]


def _run(forward: Forward, kv: KVCache, parts: list[tuple[int, list[int], int]]) -> dict[int, Tensor]:
    """Logits after the last token of each part (prompt number, tokens, start)."""
    sample = SamplePlan(SamplingParams(), 0, 0, 0, (), (), False)
    tables = {i: [2 * n + i for n in range(3)] for i, _, _ in parts}  # blocks of the prompts interleave
    plan = StepPlan(0, tuple(SequencePlan(i, ids, start, tables[i], sample) for i, ids, start in parts))
    inputs = build_inputs(plan, BLOCK_SIZE, kv.k[0].device)
    rows = torch.from_numpy(inputs.cu_seqlens[1:] - 1).to(kv.k[0].device)
    logits = forward.logits(inputs, kv, rows)
    return {i: row for (i, _, _), row in zip(parts, logits, strict=True)}

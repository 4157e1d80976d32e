"""Draws through Triton: one packed copy of parameters in, no sort, one copy of token ids out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_kernels.sampling.triton import Draws, draw
from worker.engine.plan import SamplePlan
from worker.model.philox import uniform
from worker.model.sampler import Sampler, is_greedy

_COLUMNS = ((torch.float64, 8), (torch.float64, 8), (torch.float32, 4), (torch.float32, 4), (torch.int32, 4))


class TritonSampler(Sampler):
    """Same tokens as Sampler, but for draws that fall within rounding of the edge between two tokens."""

    def _choose(self, logits: Tensor, plans: Sequence[SamplePlan], alive: Sequence[int]) -> dict[int, int]:
        """Token ids by row; rows not alive are drawn too and left out."""
        if not alive:
            return {}
        ids = read_out(draw(logits, pack_draws(plans, logits.device)))
        return {i: ids[i] for i in alive}


def read_out(ids: Tensor) -> list[int]:
    """Through pinned memory, waiting for this copy alone."""
    if ids.device.type != "cuda":
        return ids.tolist()
    host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    host.copy_(ids, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return host.tolist()


def pack_draws(plans: Sequence[SamplePlan], device: torch.device) -> Draws:
    """The parameters of rows in one buffer, copied at once."""
    count = len(plans)
    params = [p.params for p in plans]
    columns = (
        np.array([uniform(p.seed, p.choice, p.position) for p in plans], np.float64),
        np.array([p.top_p for p in params], np.float64),
        np.array([0.0 if is_greedy(p) else max(p.params.temperature, 1e-30) for p in plans], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([max(0, min(p.top_k, 2**31 - 1)) for p in params], np.int32),
    )
    buffer = torch.from_numpy(np.concatenate([c.view(np.uint8) for c in columns])).to(device)
    parts = buffer.split([count * size for _, size in _COLUMNS])
    u, top_p, temperature, min_p, top_k = (
        part.view(dtype) for part, (dtype, _) in zip(parts, _COLUMNS, strict=True)
    )
    return Draws(temperature, top_k, top_p, min_p, u)

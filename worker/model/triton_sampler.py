"""Draws through Triton: one packed copy of parameters in, no sort, one copy of token ids out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_kernels.sampling.triton import Draws, argmax, draw
from worker.engine.plan import SamplePlan
from worker.model.penalties import needs_adjusting
from worker.model.philox import uniform
from worker.model.sampler import Sampler, is_greedy
from worker.model.transfer import Readout, send

_COLUMNS = ((torch.float64, 8), (torch.float64, 8), (torch.float32, 4), (torch.float32, 4), (torch.int32, 4))


class TritonSampler(Sampler):
    """Same tokens as Sampler, but for draws that fall within rounding of the edge between two tokens."""

    def _choose(self, logits: Tensor, plans: Sequence[SamplePlan], alive: Sequence[int]) -> dict[int, int]:
        """Token ids by row; rows not alive are drawn too and left out."""
        if not alive:
            return {}
        ids = Readout(draw(logits, pack_draws(plans, logits.device))).wait()
        return {i: ids[i] for i in alive}

    def begin(self, logits: Tensor, plans: Sequence[SamplePlan]) -> Tensor | None:
        if any(needs_adjusting(p) or p.params.logprobs is not None for p in plans):
            return None
        raw = logits[:, : self.vocab_size]
        best = argmax(raw)[0]
        if all(map(is_greedy, plans)):
            return best
        draws = pack_draws(plans, raw.device)
        return torch.where((best >= 0) & (draws.temperature > 0), draw(raw, draws), best)


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
    buffer = send(torch.from_numpy(np.concatenate([c.view(np.uint8) for c in columns])), device)
    parts = buffer.split([count * size for _, size in _COLUMNS])
    u, top_p, temperature, min_p, top_k = (
        part.view(dtype) for part, (dtype, _) in zip(parts, _COLUMNS, strict=True)
    )
    return Draws(temperature, top_k, top_p, min_p, u)

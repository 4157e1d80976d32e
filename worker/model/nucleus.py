"""Temperature, top-k, top-p, min-p and the draw itself, over rows that are not greedy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.messages import SamplingParams

PREFIX = 1024  # how many of the likeliest tokens are sorted before a whole row is


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """One token id a row. logits [R, vocab] fp32 with at least one finite entry a row; uniforms in [0, 1)."""
    scaled = _scale(logits, params)
    _keep_top_k(scaled, params)
    _keep_top_p(scaled, params)
    _keep_min_p(scaled, params)
    return _invert(scaled, uniforms)


def _scale(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(logits - max) / temperature: at most 0, so that nothing overflows however small the temperature."""
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
    peaks = logits.amax(-1, keepdim=True)
    return (logits - peaks).div_(temperatures.float().clamp_min_(1e-30)[:, None])


def _keep_top_k(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    vocab = scaled.shape[1]
    for k, rows in _rows_by([p.top_k if 0 < p.top_k < vocab else 0 for p in params]):
        if k:
            values = scaled[rows]
            limit = values.topk(int(k), dim=-1).values[:, -1:]
            scaled[rows] = values.masked_fill_(values < limit, -torch.inf)


def _keep_top_p(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    for p, rows in _rows_by([p.top_p if p.top_p < 1.0 else 0.0 for p in params]):
        if p:
            values = scaled[rows]
            limit = _top_p_limits(values, p)
            scaled[rows] = values.masked_fill_(values < limit[:, None], -torch.inf)


def _top_p_limits(values: Tensor, top_p: float) -> Tensor:
    """The smallest value each row keeps: the fewest of the likeliest tokens whose mass reaches top_p."""
    masses = values.log_softmax(-1)
    prefix = min(PREFIX, values.shape[1])
    best, order = masses.topk(prefix, dim=-1)
    reached = best.double().exp_().cumsum(-1) >= top_p
    limits = values.gather(1, order.gather(1, _first(reached)))[:, 0]
    short = (~reached[:, -1]).nonzero()[:, 0]
    if len(short) and prefix < values.shape[1]:
        ranked, order = masses[short].sort(dim=-1, descending=True, stable=True)
        reached = ranked.double().exp_().cumsum(-1) >= top_p
        reached[:, -1] = True  # rounding may leave the whole mass below top_p
        limits[short] = values[short].gather(1, order.gather(1, _first(reached)))[:, 0]
    elif len(short):
        limits[short] = -torch.inf
    return limits


def _first(flags: Tensor) -> Tensor:
    """[R, 1]: the index of the first True of each row (0 where there is none)."""
    return flags.int().argmax(-1, keepdim=True)


def _keep_min_p(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    limits = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    if any(limit > -math.inf for limit in limits):
        bounds = torch.tensor(limits, dtype=scaled.dtype, device=scaled.device)[:, None]
        scaled.masked_fill_(scaled < bounds, -torch.inf)  # the likeliest stands at 0


def _invert(scaled: Tensor, uniforms: Sequence[float]) -> list[int]:
    """The first id whose cumulative weight exceeds u · total, which always is one of positive weight."""
    cumulative = scaled.exp_().cumsum(-1, dtype=torch.float64)
    totals = cumulative[:, -1:]
    targets = torch.tensor(uniforms, dtype=torch.float64, device=scaled.device)[:, None] * totals
    targets = torch.minimum(targets, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()


def _rows_by(values: Sequence[float]) -> list[tuple[float, Tensor]]:
    """Rows grouped by an equal parameter."""
    groups: dict[float, list[int]] = {}
    for row, value in enumerate(values):
        groups.setdefault(value, []).append(row)
    return [(value, torch.tensor(rows)) for value, rows in groups.items()]

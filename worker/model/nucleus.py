"""Temperature, top-k, top-p, min-p and the draw itself, over rows that are not greedy.

Each filter comes down to one limit: the smallest scaled logit a row keeps. Limits are sought among a row's
likeliest 64 tokens first, then 1,024, then all; which of these a row needs is a matter of its own logits and
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.messages import SamplingParams

PREFIXES = (64, 1024)
BLOCK = 64
ROWS = 8  # computed at a time, so that they stay in the cache


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of R rows as tensors [R]. Off: top_k = vocabulary, top_p = 2, min_limit = -inf."""

    top_k: Tensor
    top_p: Tensor
    min_limit: Tensor
    uniforms: Tensor

    def rows(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_limit[index], self.uniforms[index])


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """One token id a row. logits [R, vocab] fp32 with at least one finite entry a row; uniforms in [0, 1)."""
    tokens: list[int] = []
    for at in range(0, len(params), ROWS):
        part = slice(at, at + ROWS)
        tokens += _draw_rows(logits[part], params[part], uniforms[part])
    return tokens


def _draw_rows(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    vocab, device = logits.shape[1], logits.device
    scaled = _scale(logits, params)
    filters = Filters(
        torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device),
        torch.tensor([p.top_p if p.top_p < 1.0 else 2.0 for p in params], dtype=torch.float64, device=device),
        torch.tensor([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params], device=device),
        torch.tensor(uniforms, dtype=torch.float64, device=device),
    )
    tokens = torch.empty(len(params), dtype=torch.long, device=device)
    cut = (filters.top_k < vocab) | (filters.top_p <= 1.0)
    whole, some = (~cut).nonzero()[:, 0], cut.nonzero()[:, 0]
    if len(whole):
        tokens[whole] = _draw_from_all(_take(scaled, whole), filters.rows(whole))
    if len(some):
        _draw_from_likeliest(_take(scaled, some), filters.rows(some), some, tokens)
    return tokens.tolist()


def _scale(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(logits - max) / temperature: at most 0, so that nothing overflows however small the temperature."""
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperatures.clamp_min_(1e-30)[:, None])


def _draw_from_all(scaled: Tensor, filters: Filters) -> Tensor:
    """Rows [R, vocab] with neither top-k nor top-p: first a block of 64 ids is drawn, then an id of it."""
    if bool(filters.min_limit.max() > -torch.inf):
        scaled = scaled.masked_fill(scaled < filters.min_limit[:, None], -torch.inf)
    blocks = _weight_blocks(scaled)
    before = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    targets = _targets(before, filters.uniforms)
    block = torch.searchsorted(before, targets[:, None], right=True)
    start = before.gather(1, (block - 1).clamp_min(0)).masked_fill(block == 0, 0.0)[:, 0]
    inner = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    # The block's sum was rounded once more than these: a target past them means the last id of any weight.
    rest = torch.minimum(targets - start, _below(inner[:, -1]))
    return block[:, 0] * BLOCK + torch.searchsorted(inner, rest[:, None], right=True)[:, 0]


def _weight_blocks(scaled: Tensor) -> Tensor:
    """exp of rows [R, vocab] in blocks [R, n, 64], zero past the end."""
    padding = -scaled.shape[1] % BLOCK
    if padding:
        scaled = torch.nn.functional.pad(scaled, (0, padding), value=-torch.inf)
    return scaled.exp().view(scaled.shape[0], -1, BLOCK)


def _draw_from_likeliest(scaled: Tensor, filters: Filters, places: Tensor, tokens: Tensor) -> None:
    """Draw for rows [R, vocab] with top-k or top-p; each result goes to tokens[places[row]]."""
    vocab = scaled.shape[1]
    totals = _weight_blocks(scaled).sum(-1).cumsum(-1, dtype=torch.float64)[:, -1]
    for count in (*(p for p in PREFIXES if p < vocab), vocab):
        values, ids = scaled.topk(count, dim=-1)
        limits, found = _limits(values, totals, filters, vocab)
        done = found.nonzero()[:, 0]
        tokens[places[done]] = _draw_sorted(values[done], ids[done], limits[done], filters.uniforms[done])
        left = (~found).nonzero()[:, 0]
        if not len(left):
            return
        scaled, totals, places = scaled[left], totals[left], places[left]
        filters = filters.rows(left)


def _limits(values: Tensor, totals: Tensor, filters: Filters, vocab: int) -> tuple[Tensor, Tensor]:
    """The smallest value each row keeps, and whether these values were enough to know it.

    values [R, n] in descending order, the n likeliest; totals [R]: the weight of a whole row, max = 1.
    Equals of the last one kept are kept too, so a limit that equals the last value leaves a row undecided.
    """
    count, last = values.shape[1], values[:, -1]
    by_k = values.gather(1, (filters.top_k.clamp_max(count) - 1)[:, None])[:, 0]
    cut_k, cut_p = filters.top_k < vocab, filters.top_p <= 1.0
    by_k = torch.where(cut_k & (filters.top_k <= count), by_k, -torch.inf)
    mass = values.double().exp_().masked_fill_(values < by_k[:, None], 0.0).cumsum(-1)
    reached = mass >= (filters.top_p * torch.where(cut_k, mass[:, -1], totals))[:, None]
    by_p = values.gather(1, reached.int().argmax(-1, keepdim=True))[:, 0]
    by_p = torch.where(reached[:, -1], by_p, -torch.inf)
    limits = torch.maximum(torch.maximum(by_k, by_p), filters.min_limit)
    decided = (~cut_k | (by_k > last)) & (~cut_p | reached[:, -1]) & (limits > last)
    return limits, decided | (count == vocab)


def _draw_sorted(values: Tensor, ids: Tensor, limits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw among the values kept, in the order of their ids."""
    ids, order = ids.sort(dim=-1)
    values = values.gather(1, order)
    weights = values.double().exp_().masked_fill_(values < limits[:, None], 0.0)
    place = _invert(weights.cumsum(-1), uniforms)
    return ids.gather(1, place[:, None])[:, 0]


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The first place whose cumulative weight exceeds u · total, which always is one of positive weight."""
    return torch.searchsorted(cumulative, _targets(cumulative, uniforms)[:, None], right=True)[:, 0]


def _targets(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    totals = cumulative[:, -1]
    return torch.minimum(uniforms * totals, _below(totals))


def _below(values: Tensor) -> Tensor:
    """The largest number below each value."""
    return torch.nextafter(values, torch.zeros_like(values))


def _take(scaled: Tensor, rows: Tensor) -> Tensor:
    return scaled if len(rows) == scaled.shape[0] else scaled[rows]

"""Attention over blocked keys and values in plain torch: gather, mask, softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather(keys: Tensor, values: Tensor, table: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys [length, kv_heads, k_dim] and values [length, kv_heads, v_dim] out of the blocks.

    keys [blocks, kv_heads, k_dim, block_size], values [blocks, kv_heads, block_size, v_dim].
    """
    index = torch.tensor(table)
    k = keys[index].permute(0, 3, 1, 2).flatten(0, 1)
    v = values[index].permute(0, 2, 1, 3).flatten(0, 1)
    return k[:length], v[:length]


def attend(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [tokens, heads, k_dim] at positions start, start + 1, … over k, v of the whole sequence.

    Returns [tokens, heads, v_dim] in the dtype of its arguments.
    """
    tokens, heads, _ = query.shape
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,khd->htk", query, k) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    behind = torch.arange(start, start + tokens)[:, None] - torch.arange(k.shape[0])
    hidden = behind < 0
    if window:
        hidden |= behind >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(heads, tokens, 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[0]]
    return torch.einsum("htk,khd->thd", weights, v)

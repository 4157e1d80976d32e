"""Attention over KV blocks in fixed tiles of 64 keys, written with torch operations alone.

The bits of a query's result depend on its own keys and position, on nothing else: every product has 64 keys
and at least `MIN_ROWS` query rows (from there on the row count does not change a row's bits), the maximum is
exact in any order, and tiles are added in ascending order of position. A masked key adds an exact zero. So
prefill and decode, any chunking and any neighbours agree. Decodes of all sequences are computed together;
longer chunks one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.model.inputs import Ints, StepInputs, slots_at
from worker.model.kv import KVCache

TILE = 64
MIN_ROWS = 8
QUERY_CHUNK = 128  # positions of one sequence computed at a time, which bounds the scores kept


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks for. `window`: keys at this distance or more are unseen. `sinks`: [heads]."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The tiles of all sequences that compute one token, ordered by rank (1st tile of each, 2nd of each, …).

    Sequences stand in descending order of their tile count, so those with a tile of rank r are the first
    counts[r].
    """

    tokens: Tensor  # [S] packed index of each sequence's token
    counts: tuple[int, ...]  # for each rank
    sequence: Tensor  # [P] which sequence a tile belongs to
    slots: Tensor  # [P, 64], the dummy block where masked
    masked: Tensor  # [P, 1, 1, 64]


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """The tiles seen by up to `QUERY_CHUNK` consecutive tokens of one sequence."""

    first: int  # packed index of the first token
    last: int
    slots: Tensor  # [n · 64]
    masked: tuple[Tensor | None, ...]  # for each tile [tokens, 64], None where all is seen


class TiledAttention:
    """Attention of one step. Index tensors are built once for each window and shared by the layers."""

    def __init__(self, kv: KVCache, inputs: StepInputs) -> None:
        self.kv, self.inputs = kv, inputs
        self._decodes: dict[int | None, DecodeTiles | None] = {}
        self._chunks: dict[int | None, list[ChunkTiles]] = {}
        self._rows: dict[tuple[int, int | None, int], Tensor] = {}

    def attend(self, layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        """query [T, heads, k_dim] → [T, heads, v_dim]; this step's keys and values are already written."""
        shape = self.kv.layers[layer]
        out = query.new_empty(query.shape[0], query.shape[1], shape.v_dim)
        decode = self._decode_tiles(call.window)
        if decode is not None:
            rows = self._head_rows(decode.slots, shape.kv_heads, call.window, -1)
            out[decode.tokens] = self._decode(layer, query[decode.tokens], rows, decode, call)
        for i, chunk in enumerate(self._chunk_tiles(call.window)):
            rows = self._head_rows(chunk.slots, shape.kv_heads, call.window, i)
            out[chunk.first : chunk.last] = self._chunk(
                layer, query[chunk.first : chunk.last], rows, chunk, call
            )
        return out

    def _decode(
        self, layer: int, query: Tensor, rows: Tensor, tiles: DecodeTiles, call: AttentionCall
    ) -> Tensor:
        kv_heads = self.kv.layers[layer].kv_heads
        num_tiles, (num_seqs, heads, dim) = len(tiles.sequence), query.shape
        group = heads // kv_heads
        padded = query.new_zeros(num_seqs, kv_heads, max(group, MIN_ROWS), dim)
        padded[:, :, :group] = query.view(num_seqs, kv_heads, group, dim)
        q = padded.index_select(0, tiles.sequence).flatten(0, 1)
        k, v = self._gather(layer, rows, num_tiles * kv_heads, query.dtype)
        scores = (
            _scores(q, k, call).view(num_tiles, kv_heads, -1, TILE).masked_fill_(tiles.masked, -torch.inf)
        )
        peak = _add_ranks(scores.amax(-1), tiles.counts, torch.maximum)
        sinks = _sink_rows(call.sinks, kv_heads, group, padded.shape[2])
        if sinks is not None:
            peak = torch.maximum(peak, sinks)
        p = scores.sub_(peak.index_select(0, tiles.sequence).unsqueeze(-1)).exp_()
        total = _add_ranks(p.sum(-1), tiles.counts, torch.add)
        if sinks is not None:
            total = total + (sinks - peak).exp()
        mixed = _product(p.flatten(0, 1), v).view(num_tiles, kv_heads, padded.shape[2], -1)
        out = _add_ranks(mixed, tiles.counts, torch.add) / total.unsqueeze(-1)
        return out[:, :, :group].reshape(num_seqs, heads, -1)

    def _chunk(
        self, layer: int, query: Tensor, rows: Tensor, tiles: ChunkTiles, call: AttentionCall
    ) -> Tensor:
        kv_heads, num_tiles = self.kv.layers[layer].kv_heads, len(tiles.masked)
        tokens, heads, dim = query.shape
        group = heads // kv_heads
        padding = max(0, -(-MIN_ROWS // group) - tokens)
        q = query.view(tokens, kv_heads, group, dim).transpose(0, 1)
        if padding:
            q = torch.cat([q, q.new_zeros(kv_heads, padding, group, dim)], dim=1)
        q = q.reshape(kv_heads, -1, dim)
        k, v = self._gather(layer, rows, num_tiles * kv_heads, query.dtype)
        k, v = k.view(num_tiles, kv_heads, TILE, -1), v.view(num_tiles, kv_heads, TILE, -1)
        scores = [_masked(_scores(q, k[t], call), m, group) for t, m in enumerate(tiles.masked)]
        peak = scores[0].amax(-1)
        for tile in scores[1:]:
            peak = torch.maximum(peak, tile.amax(-1))
        sinks = _sink_rows(call.sinks, kv_heads, group, group)
        if sinks is not None:
            sinks = sinks.repeat(1, tokens + padding)
            peak = torch.maximum(peak, sinks)
        total, out = torch.zeros_like(peak), q.new_zeros(kv_heads, q.shape[1], v.shape[-1])
        for t, tile in enumerate(scores):
            p = tile.sub_(peak.unsqueeze(-1)).exp_()
            total += p.sum(-1)
            out += _product(p, v[t])
        if sinks is not None:
            total = total + (sinks - peak).exp()
        out = (out / total.unsqueeze(-1)).view(kv_heads, -1, group, v.shape[-1])[:, :tokens]
        return out.transpose(0, 1).reshape(tokens, heads, -1)

    def _gather(self, layer: int, rows: Tensor, num_tiles: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = self.kv.read(layer, rows, dtype)
        return k.view(num_tiles, TILE, -1), v.view(num_tiles, TILE, -1)

    def _head_rows(self, slots: Tensor, kv_heads: int, window: int | None, item: int) -> Tensor:
        """Rows of a layer's [slots · kv_heads, dim] view in the order tile, head, key."""
        key = (kv_heads, window, item)
        if key not in self._rows:
            by_tile = slots.view(-1, 1, TILE) * kv_heads
            heads = torch.arange(kv_heads, device=slots.device).view(1, kv_heads, 1)
            self._rows[key] = (by_tile + heads).flatten()
        return self._rows[key]

    def _decode_tiles(self, window: int | None) -> DecodeTiles | None:
        if window not in self._decodes:
            self._decodes[window] = _build_decode_tiles(self.inputs, window, self.kv.dummy_block)
        return self._decodes[window]

    def _chunk_tiles(self, window: int | None) -> list[ChunkTiles]:
        if window not in self._chunks:
            self._chunks[window] = _build_chunk_tiles(self.inputs, window, self.kv.dummy_block)
        return self._chunks[window]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """bmm. A batch of one is computed as two halves, for torch would split its sums over the threads."""
    if a.shape[0] > 1:
        return torch.bmm(a, b)
    rows = a.shape[1]
    half = max(MIN_ROWS, -(-rows // 2))
    halves = torch.nn.functional.pad(a, (0, 0, 0, 2 * half - rows)).view(2, half, -1)
    return torch.bmm(halves, b.expand(2, -1, -1)).view(1, 2 * half, -1)[:, :rows]


def _scores(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """q [n, rows, dim], k [n, 64, dim] → [n, rows, 64]"""
    scores = _product(q, k.transpose(1, 2)).mul_(call.scale)
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    return scores


def _masked(scores: Tensor, masked: Tensor | None, group: int) -> Tensor:
    """scores [kv_heads, tokens · group (+ padding rows), 64] with -inf where masked [tokens, 64]."""
    if masked is not None:
        seen = scores.view(scores.shape[0], -1, group, TILE)[:, : masked.shape[0]]
        seen.masked_fill_(masked[None, :, None], -torch.inf)
    return scores


def _sink_rows(sinks: Tensor | None, kv_heads: int, group: int, rows: int) -> Tensor | None:
    """sinks [heads] → [kv_heads, rows], padding rows zero."""
    if sinks is None:
        return None
    return torch.nn.functional.pad(sinks.float().view(kv_heads, group), (0, rows - group))


def _add_ranks(parts: Tensor, counts: tuple[int, ...], op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the tiles of each sequence in ascending rank: parts [P, …] → [S, …]."""
    ranks = parts.split(counts)
    out = ranks[0].clone()
    for rank in ranks[1:]:
        out[: len(rank)] = op(out[: len(rank)], rank)
    return out


def _build_decode_tiles(inputs: StepInputs, window: int | None, dummy_block: int) -> DecodeTiles | None:
    sequences = np.flatnonzero(inputs.query_lens == 1)
    if not len(sequences):
        return None
    ends = inputs.kv_lens[sequences]
    firsts = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    first_tiles = firsts // TILE
    num_tiles = (ends - 1) // TILE + 1 - first_tiles
    order = np.argsort(-num_tiles, kind="stable")
    sequences, ends, firsts = sequences[order], ends[order], firsts[order]
    first_tiles, num_tiles = first_tiles[order], num_tiles[order]
    counts = tuple(int((num_tiles > rank).sum()) for rank in range(int(num_tiles[0])))
    owner = np.concatenate([np.arange(count) for count in counts])
    rank = np.repeat(np.arange(len(counts)), counts)
    positions = (first_tiles[owner] + rank)[:, None] * TILE + np.arange(TILE)
    masked = (positions < firsts[owner][:, None]) | (positions >= ends[owner][:, None])
    tables = _padded_tables([inputs.block_table(i) for i in sequences])
    blocks = np.minimum(positions // inputs.block_size, tables.shape[1] - 1)
    slots = tables[owner[:, None], blocks] * inputs.block_size + positions % inputs.block_size
    slots[masked] = dummy_block * inputs.block_size
    device = inputs.slots.device
    return DecodeTiles(
        tokens=torch.from_numpy(inputs.cu_seqlens[sequences]).to(device),
        counts=counts,
        sequence=torch.from_numpy(owner).to(device),
        slots=torch.from_numpy(slots).to(device),
        masked=torch.from_numpy(masked)[:, None, None].to(device),
    )


def _padded_tables(tables: list[Ints]) -> Ints:
    padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _build_chunk_tiles(inputs: StepInputs, window: int | None, dummy_block: int) -> list[ChunkTiles]:
    chunks = []
    for i in np.flatnonzero(inputs.query_lens > 1):
        first_token, start, length = (
            int(inputs.cu_seqlens[i]),
            int(inputs.starts[i]),
            int(inputs.query_lens[i]),
        )
        for at in range(0, length, QUERY_CHUNK):
            size = min(QUERY_CHUNK, length - at)
            tiles = _one_chunk(inputs, int(i), start + at, size, window, dummy_block)
            chunks.append(ChunkTiles(first_token + at, first_token + at + size, *tiles))
    return chunks


def _one_chunk(
    inputs: StepInputs, sequence: int, start: int, size: int, window: int | None, dummy_block: int
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Slots and masks of the tiles seen by the tokens at positions start … start + size - 1."""
    first = max(0, start + 1 - window) if window else 0
    end = start + size
    keys = np.arange(first // TILE * TILE, -(-end // TILE) * TILE)
    queries = np.arange(start, end)[:, None]
    masked = keys > queries
    if window:
        masked |= keys <= queries - window
    known = np.minimum(keys, end - 1)
    slots = slots_at(inputs.block_table(sequence), known, inputs.block_size)
    slots[(keys >= end) | (keys < first)] = dummy_block * inputs.block_size
    device = inputs.slots.device
    by_tile = np.split(masked, len(keys) // TILE, axis=1)
    masks = tuple(torch.from_numpy(m.copy()).to(device) if m.any() else None for m in by_tile)
    return torch.from_numpy(slots).to(device), masks

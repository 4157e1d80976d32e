"""The kernels of triton.py: what one program does, and how splits of the keys are merged."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Shape(NamedTuple):
    """What a kernel is compiled for. A block is a head's size, padded to a power of two."""

    kv_heads: int
    group: int  # query heads to a KV head
    k_dim: int
    v_dim: int
    k_block: int
    v_block: int
    block_size: int  # tokens of a KV block
    rows: int  # (token, query head) pairs of a program
    queries: int  # tokens of a program
    tile: int  # keys that are read at once
    split: int  # keys that are added up before splits are merged


@triton.jit
def _merge(top, total, out, top2, total2, out2):
    """Two parts of a softmax, each as its maximum, its sum and its weighted values under that maximum."""
    both = tl.maximum(top, top2)
    safe = tl.where(both == float("-inf"), 0.0, both)
    a, b = tl.exp(top - safe), tl.exp(top2 - safe)
    return both, total * a + total2 * b, out * a[:, None] + out2 * b[:, None]


@triton.jit
def _tanh(x):
    small = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def _nothing(SHAPE: tl.constexpr):
    """A part of a softmax without keys."""
    top = tl.full([SHAPE.rows], float("-inf"), tl.float32)
    total = tl.full([SHAPE.rows], 0.0, tl.float32)
    return top, total, tl.full([SHAPE.rows, SHAPE.v_block], 0.0, tl.float32)


@triton.jit
def _split(
    split,
    q,  # [ROWS, K_BLOCK]
    position,  # [ROWS]
    low,
    kv_len,
    kv_head,
    table,  # block table of the sequence
    keys,
    values,
    k_scales,
    v_scales,
    k_strides,
    v_strides,
    scale,
    softcap,
    window,
    SHAPE: tl.constexpr,
    WIDEN: tl.constexpr,
    QUANTISED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Maximum, sum and weighted values [rows, v_block] over the keys of one split that rows may see."""
    k_dim, v_dim = tl.arange(0, SHAPE.k_block), tl.arange(0, SHAPE.v_block)
    top, total, out = _nothing(SHAPE)
    first = tl.maximum(split * SHAPE.split, low // SHAPE.tile * SHAPE.tile)
    for at in range(first, tl.minimum(split * SHAPE.split + SHAPE.split, kv_len), SHAPE.tile):
        key = at + tl.arange(0, SHAPE.tile)
        written = key < kv_len
        block = tl.load(table + key // SHAPE.block_size, mask=written, other=0).to(tl.int64)
        slot = key % SHAPE.block_size
        k_base = block * k_strides[0] + kv_head * k_strides[1] + slot * k_strides[3]
        k = tl.load(
            keys + k_base[None, :] + k_dim[:, None] * k_strides[2],
            mask=(k_dim < SHAPE.k_dim)[:, None] & written[None, :],
            other=0.0,
        )
        v_base = block * v_strides[0] + kv_head * v_strides[1] + slot * v_strides[2]
        v = tl.load(
            values + v_base[:, None] + v_dim[None, :] * v_strides[3],
            mask=written[:, None] & (v_dim < SHAPE.v_dim)[None, :],
            other=0.0,
        )
        if QUANTISED or WIDEN:
            k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee") * scale
        if QUANTISED:
            at_scale = (block * SHAPE.block_size + slot) * SHAPE.kv_heads + kv_head
            s *= tl.load(k_scales + at_scale, mask=written, other=0.0)[None, :]
        if CAPPED:
            s = _tanh(s / softcap) * softcap
        behind = position[:, None] - key[None, :]
        seen = behind >= 0
        if WINDOWED:
            seen = seen & (behind < window)
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.where(seen, tl.exp(s - safe[:, None]), 0.0)
        old = tl.exp(top - safe)
        total = total * old + tl.sum(p, 1)
        if QUANTISED:
            p *= tl.load(v_scales + at_scale, mask=written, other=0.0)[None, :]
        out = out * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return top, total, out


@triton.jit
def _rows(
    program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED: tl.constexpr, SHAPE: tl.constexpr
):
    """Which tokens and heads a program's rows are, and which keys they may see: low … kv_len - 1."""
    sequence = tl.load(block_seq + program)
    known = tl.maximum(sequence, 0)
    first = tl.load(block_first + program)
    begin, end, start = tl.load(cu + known), tl.load(cu + known + 1), tl.load(starts + known)
    row = tl.arange(0, SHAPE.rows)
    token = first + row // SHAPE.group
    head = kv_head * SHAPE.group + row % SHAPE.group
    live = (row < SHAPE.queries * SHAPE.group) & (token < end)
    position = start + token - begin
    kv_len = start + tl.minimum(first + SHAPE.queries, end) - begin
    low = tl.zeros_like(kv_len)
    if WINDOWED:
        low = tl.maximum(start + first - begin - window + 1, 0)
    return sequence, token.to(tl.int64), head, live, position, low, kv_len


@triton.jit
def _start(sinks, head, live, HAS_SINKS: tl.constexpr, SHAPE: tl.constexpr):
    """The softmax before any key: nothing, or the sink."""
    top, total, out = _nothing(SHAPE)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        total = tl.full([SHAPE.rows], 1.0, tl.float32)
    return top, total, out


@triton.jit
def _finish(out, total, result, token, head, live, SHAPE: tl.constexpr):
    v_dim = tl.arange(0, SHAPE.v_block)
    heads = SHAPE.kv_heads * SHAPE.group
    y = result / tl.where(live, total, 1.0)[:, None]
    places = (token * heads + head)[:, None] * SHAPE.v_dim + v_dim[None, :]
    tl.store(out + places, y.to(out.dtype.element_ty), mask=live[:, None] & (v_dim < SHAPE.v_dim)[None, :])


@triton.jit
def _place(program, kv_head, split, splits, SHAPE: tl.constexpr):
    """Where a split's part lies: its rows [rows], and their values [rows, v_block]."""
    part = (program.to(tl.int64) * SHAPE.kv_heads + kv_head) * splits + split
    row = part * SHAPE.rows + tl.arange(0, SHAPE.rows)
    return row, row[:, None] * SHAPE.v_block + tl.arange(0, SHAPE.v_block)[None, :]


@triton.jit
def attend(
    out,  # [tokens, heads, v_dim]
    part_out,  # [programs, kv_heads, splits, ROWS, V_BLOCK] fp32
    part_top,  # [programs, kv_heads, splits, ROWS] fp32
    part_total,
    query,  # [tokens, heads, k_dim]
    keys,  # [blocks, kv_heads, k_dim, block_size] by strides
    values,  # [blocks, kv_heads, block_size, v_dim] by strides
    k_scales,  # [blocks, block_size, kv_heads] fp32
    v_scales,
    sinks,  # [heads]
    block_seq,  # [programs]: the sequence, -1 for none
    block_first,  # [programs]: its first token, packed
    cu,  # [sequences + 1]
    starts,  # [sequences]
    tables,  # [sequences, table_width]
    table_width,
    k_strides,
    v_strides,
    scale,
    softcap,
    window,
    splits,
    SHAPE: tl.constexpr,
    WALK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    QUANTISED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, token, head, live, position, low, kv_len = _rows(
        program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED, SHAPE
    )
    if sequence < 0:
        return
    k_dim = tl.arange(0, SHAPE.k_block)
    q = tl.load(
        query + ((token * SHAPE.kv_heads * SHAPE.group + head) * SHAPE.k_dim)[:, None] + k_dim[None, :],
        mask=live[:, None] & (k_dim < SHAPE.k_dim)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    if WALK:
        top, total, result = _start(sinks, head, live, HAS_SINKS, SHAPE)
        for split in range(low // SHAPE.split, tl.cdiv(kv_len, SHAPE.split)):
            top2, total2, result2 = _split(
                split, q, position, low, kv_len, kv_head, table, keys, values, k_scales, v_scales,
                k_strides, v_strides, scale, softcap, window, SHAPE, WIDEN, QUANTISED, CAPPED, WINDOWED,
            )  # fmt: skip
            top, total, result = _merge(top, total, result, top2, total2, result2)
        _finish(out, total, result, token, head, live, SHAPE)
    else:
        split = tl.program_id(2)
        if (split < low // SHAPE.split) | (split >= tl.cdiv(kv_len, SHAPE.split)):
            return
        top, total, result = _split(
            split, q, position, low, kv_len, kv_head, table, keys, values, k_scales, v_scales,
            k_strides, v_strides, scale, softcap, window, SHAPE, WIDEN, QUANTISED, CAPPED, WINDOWED,
        )  # fmt: skip
        row, place = _place(program, kv_head, split, splits, SHAPE)
        tl.store(part_top + row, top)
        tl.store(part_total + row, total)
        tl.store(part_out + place, result)


@triton.jit
def merge_splits(
    out,
    part_out,
    part_top,
    part_total,
    sinks,
    block_seq,
    block_first,
    cu,
    starts,
    window,
    splits,
    SHAPE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, token, head, live, _, low, kv_len = _rows(
        program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED, SHAPE
    )
    if sequence < 0:
        return
    top, total, result = _start(sinks, head, live, HAS_SINKS, SHAPE)
    for split in range(low // SHAPE.split, tl.cdiv(kv_len, SHAPE.split)):
        row, place = _place(program, kv_head, split, splits, SHAPE)
        top2, total2 = tl.load(part_top + row), tl.load(part_total + row)
        top, total, result = _merge(top, total, result, top2, total2, tl.load(part_out + place))
    _finish(out, total, result, token, head, live, SHAPE)

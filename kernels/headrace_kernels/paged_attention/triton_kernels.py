"""The kernels of triton.py: what one program does, and how splits of the keys are merged."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


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
    """Maximum, sum and weighted values [ROWS, V_BLOCK] over the keys of one split that rows may see."""
    KV_HEADS: tl.constexpr = SHAPE[0]
    K_DIM: tl.constexpr = SHAPE[2]
    V_DIM: tl.constexpr = SHAPE[3]
    K_BLOCK: tl.constexpr = SHAPE[4]
    V_BLOCK: tl.constexpr = SHAPE[5]
    BLOCK_SIZE: tl.constexpr = SHAPE[6]
    ROWS: tl.constexpr = SHAPE[7]
    TILE: tl.constexpr = SHAPE[9]
    SPLIT: tl.constexpr = SHAPE[10]
    k_dim, v_dim = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, V_BLOCK], tl.float32)
    first = tl.maximum(split * SPLIT, low // TILE * TILE)
    for at in range(first, tl.minimum(split * SPLIT + SPLIT, kv_len), TILE):
        key = at + tl.arange(0, TILE)
        written = key < kv_len
        block = tl.load(table + key // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        k_base = block * k_strides[0] + kv_head * k_strides[1] + slot * k_strides[3]
        k = tl.load(
            keys + k_base[None, :] + k_dim[:, None] * k_strides[2],
            mask=(k_dim < K_DIM)[:, None] & written[None, :],
            other=0.0,
        )
        v_base = block * v_strides[0] + kv_head * v_strides[1] + slot * v_strides[2]
        v = tl.load(
            values + v_base[:, None] + v_dim[None, :] * v_strides[3],
            mask=written[:, None] & (v_dim < V_DIM)[None, :],
            other=0.0,
        )
        if QUANTISED or WIDEN:
            k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee") * scale
        if QUANTISED:
            at_scale = (block * BLOCK_SIZE + slot) * KV_HEADS + kv_head
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
    GROUP: tl.constexpr = SHAPE[1]
    ROWS: tl.constexpr = SHAPE[7]
    QUERIES: tl.constexpr = SHAPE[8]
    sequence = tl.load(block_seq + program)
    known = tl.maximum(sequence, 0)
    first = tl.load(block_first + program)
    begin, end, start = tl.load(cu + known), tl.load(cu + known + 1), tl.load(starts + known)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < QUERIES * GROUP) & (token < end)
    position = start + token - begin
    kv_len = start + tl.minimum(first + QUERIES, end) - begin
    low = tl.zeros_like(kv_len)
    if WINDOWED:
        low = tl.maximum(start + first - begin - window + 1, 0)
    return sequence, token.to(tl.int64), head, live, position, low, kv_len


@triton.jit
def _start(sinks, head, live, HAS_SINKS: tl.constexpr, SHAPE: tl.constexpr):
    """The softmax before any key: nothing, or the sink."""
    V_BLOCK: tl.constexpr = SHAPE[5]
    ROWS: tl.constexpr = SHAPE[7]
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    return top, total, tl.zeros([ROWS, V_BLOCK], tl.float32)


@triton.jit
def _finish(out, total, result, token, head, live, SHAPE: tl.constexpr):
    HEADS: tl.constexpr = SHAPE[0] * SHAPE[1]
    V_DIM: tl.constexpr = SHAPE[3]
    V_BLOCK: tl.constexpr = SHAPE[5]
    v_dim = tl.arange(0, V_BLOCK)
    y = result / tl.where(live, total, 1.0)[:, None]
    places = (token * HEADS + head)[:, None] * V_DIM + v_dim[None, :]
    tl.store(out + places, y.to(out.dtype.element_ty), mask=live[:, None] & (v_dim < V_DIM)[None, :])


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
    KV_HEADS: tl.constexpr = SHAPE[0]
    GROUP: tl.constexpr = SHAPE[1]
    K_DIM: tl.constexpr = SHAPE[2]
    K_BLOCK: tl.constexpr = SHAPE[4]
    V_BLOCK: tl.constexpr = SHAPE[5]
    ROWS: tl.constexpr = SHAPE[7]
    SPLIT: tl.constexpr = SHAPE[10]
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, token, head, live, position, low, kv_len = _rows(
        program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED, SHAPE
    )
    if sequence < 0:
        return
    k_dim = tl.arange(0, K_BLOCK)
    q = tl.load(
        query + ((token * KV_HEADS * GROUP + head) * K_DIM)[:, None] + k_dim[None, :],
        mask=live[:, None] & (k_dim < K_DIM)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    if WALK:
        top, total, result = _start(sinks, head, live, HAS_SINKS, SHAPE)
        for split in range(low // SPLIT, tl.cdiv(kv_len, SPLIT)):
            top2, total2, result2 = _split(
                split, q, position, low, kv_len, kv_head, table, keys, values, k_scales, v_scales,
                k_strides, v_strides, scale, softcap, window, SHAPE, WIDEN, QUANTISED, CAPPED, WINDOWED,
            )  # fmt: skip
            top, total, result = _merge(top, total, result, top2, total2, result2)
        _finish(out, total, result, token, head, live, SHAPE)
    else:
        split = tl.program_id(2)
        if (split < low // SPLIT) | (split >= tl.cdiv(kv_len, SPLIT)):
            return
        top, total, result = _split(
            split, q, position, low, kv_len, kv_head, table, keys, values, k_scales, v_scales,
            k_strides, v_strides, scale, softcap, window, SHAPE, WIDEN, QUANTISED, CAPPED, WINDOWED,
        )  # fmt: skip
        row = ((program.to(tl.int64) * KV_HEADS + kv_head) * splits + split) * ROWS + tl.arange(0, ROWS)
        tl.store(part_top + row, top)
        tl.store(part_total + row, total)
        tl.store(part_out + row[:, None] * V_BLOCK + tl.arange(0, V_BLOCK)[None, :], result)


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
    KV_HEADS: tl.constexpr = SHAPE[0]
    V_BLOCK: tl.constexpr = SHAPE[5]
    ROWS: tl.constexpr = SHAPE[7]
    SPLIT: tl.constexpr = SHAPE[10]
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, token, head, live, _, low, kv_len = _rows(
        program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED, SHAPE
    )
    if sequence < 0:
        return
    top, total, result = _start(sinks, head, live, HAS_SINKS, SHAPE)
    for split in range(low // SPLIT, tl.cdiv(kv_len, SPLIT)):
        row = ((program.to(tl.int64) * KV_HEADS + kv_head) * splits + split) * ROWS + tl.arange(0, ROWS)
        result2 = tl.load(part_out + row[:, None] * V_BLOCK + tl.arange(0, V_BLOCK)[None, :])
        top, total, result = _merge(
            top, total, result, tl.load(part_top + row), tl.load(part_total + row), result2
        )
    _finish(out, total, result, token, head, live, SHAPE)

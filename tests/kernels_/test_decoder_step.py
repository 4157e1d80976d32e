"""The whole step: right for each option, and the same bits for any chunking, neighbours or threads."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_kernels import matmul
from headrace_kernels.decoder_step import (
    PARTS,
    CompiledDecoder,
    DecoderShape,
    LayerWeights,
    StepTimes,
    gate_up_rows,
    reference,
)
from headrace_kernels.dispatch import Backend
from headrace_kernels.paged_attention import pack_sequences

HIDDEN, UNITS, HEADS, KV_HEADS, DIM, VOCABULARY, BLOCK = 64, 72, 6, 2, 12, 61, 16
SHAPE = DecoderShape(HIDDEN, UNITS, HEADS, "silu", 1e-5)


def _tables(positions: int = 128, dims: int = DIM) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(dims // 2)
    return angles.cos(), angles.sin()


def _decoder(
    on: Backend,
    shape: DecoderShape = SHAPE,
    bias: bool = False,
    int8: bool = False,
    dim: int = DIM,
    **options: Any,
) -> CompiledDecoder:
    draw = torch.Generator().manual_seed(5)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw) * 0.3

    def pack(w: Tensor, b: Tensor | None = None, rows: list[int] | None = None) -> matmul.PackedWeight:
        if not int8 or w.shape[1] % 32:
            return matmul.pack(w, b, rows=rows, on=on)
        blocks = matmul.reference.quantize_q8_0(w)
        return matmul.pack_blocks(blocks, "q8_0", b, rows=rows, int8_activations=True, on=on)

    def weight(n: int, k: int) -> matmul.PackedWeight:
        return pack(random(n, k), random(n) if bias else None)

    def gate_up() -> matmul.PackedWeight:
        units = shape.intermediate
        rows, w, b = gate_up_rows(units), random(2 * units, HIDDEN), random(2 * units)
        padded = torch.cat([b, torch.zeros(1)])[rows]
        return pack(w, padded if bias else None, rows)

    layers = [
        LayerWeights(
            qkv=weight((shape.heads + 2 * KV_HEADS) * dim, HIDDEN),
            output=weight(HIDDEN, shape.heads * dim),
            gate_up=gate_up(),
            down=weight(HIDDEN, shape.intermediate),
            attention_norm=1 + random(HIDDEN),
            mlp_norm=1 + random(HIDDEN),
            scale=0.3,
        )
        for _ in range(3)
    ]
    layers[1] = replace(layers[1], **options)
    embedding = pack(random(VOCABULARY, HIDDEN))
    decoder = CompiledDecoder(shape, layers, embedding, embedding, 1 + random(HIDDEN))
    decoder.bind(
        [torch.full((32, KV_HEADS, dim, BLOCK), torch.nan) for _ in layers],
        [torch.full((32, KV_HEADS, BLOCK, dim), torch.nan) for _ in layers],
    )
    decoder.set_tables([_tables(dims=dim), _tables(dims=8)])
    return decoder


def _run(decoder: CompiledDecoder, parts: list[tuple[Tensor, int, list[int]]]) -> Tensor:
    """Logits of all tokens of the parts (token ids, start, block table)."""
    counts = [len(ids) for ids, _, _ in parts]
    positions = torch.cat([torch.arange(start, start + len(ids)) for ids, start, _ in parts])
    tables = [np.array(table) for _, _, table in parts]
    slots = torch.cat(
        [
            torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, start + len(ids))])
            for ids, start, table in parts
        ]
    )
    cu = np.concatenate(([0], np.cumsum(counts)))
    sequences = pack_sequences(cu, np.array([start for _, start, _ in parts]), tables, BLOCK)
    ids = torch.cat([ids for ids, _, _ in parts])
    return decoder.step(ids, positions, slots, sequences, torch.arange(len(ids)))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "gelu": {"shape": replace(SHAPE, activation="gelu_tanh")},
    "scales": {"shape": replace(SHAPE, embedding_scale=3.0, residual_scale=0.7, logit_scale=0.5)},
    "caps": {"shape": replace(SHAPE, logit_softcap=3.0), "softcap": 2.0},
    "window": {"window": 20},
    "no rotation": {"rotary_table": None},
    "other table": {"rotary_table": 1, "rotary_interleaved": True},
    "head norms": {"q_norm": torch.linspace(0.5, 2, DIM), "k_norm": torch.linspace(2, 1, DIM)},
    "post norms": {
        "attention_post_norm": torch.linspace(0.5, 1, HIDDEN),
        "mlp_post_norm": torch.linspace(1, 0.1, HIDDEN),
    },
    "int8": {"int8": True, "shape": replace(SHAPE, intermediate=96)},
    "int8, a head is a group": {"int8": True, "shape": replace(SHAPE, intermediate=96), "dim": 32},
    "int8, heads share a group": {"int8": True, "shape": replace(SHAPE, intermediate=96, heads=8)},
    "sinks": {"sinks": torch.linspace(-1, 3, HEADS)},
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_step_is_right_for_each_option(cpu: Backend, draw: torch.Generator, name: str) -> None:
    decoder = _decoder(cpu, **OPTIONS[name])
    ids = torch.randint(VOCABULARY, (41,), generator=draw)
    tables = {0: _tables(dims=OPTIONS[name].get("dim", DIM)), 1: _tables(dims=8)}
    expected = reference.logits(decoder, tables, ids, KV_HEADS).float()
    got = _run(decoder, [(ids, 0, [7, 3, 30])])
    if name.startswith(
        "int8"
    ):  # a byte may round the other way than in fp64, and goes on from layer to layer
        assert float((got - expected).norm() / expected.norm()) < 0.03
    else:
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4), (got - expected).abs().max()


@pytest.mark.parametrize("name", list(OPTIONS))
def test_chunks_neighbours_and_threads_do_not_change_bits(
    cpu: Backend, draw: torch.Generator, name: str
) -> None:
    decoder = _decoder(cpu, **OPTIONS[name])
    a, b = (torch.randint(VOCABULARY, (n,), generator=draw) for n in (90, 37))
    whole = _run(decoder, [(a, 0, [0, 1, 2, 3, 4, 5])])
    other = _run(decoder, [(b, 0, [10, 11, 12])])
    for at in range(0, 90, 9):
        cpu.library.hr_set_threads(1 + at // 9 % 3)
        parts = [
            (b[at // 3 : at // 3 + 3], at // 3, [15, 9, 8]),
            (a[at : at + 9], at, [20, 21, 22, 31, 24, 25]),
        ]
        got = _run(decoder, parts)
        assert torch.equal(got[3:], whole[at : at + 9]), at
        assert torch.equal(got[:3], other[at // 3 : at // 3 + 3]), at
    cpu.library.hr_set_threads(2)
    single = torch.cat([_run(decoder, [(b[i : i + 1], i, [27, 28, 29])]) for i in range(37)])
    assert torch.equal(single, other)


def test_instruction_sets_agree(every_cpu: list[Backend], draw: torch.Generator) -> None:
    ids = torch.randint(VOCABULARY, (50,), generator=draw)
    results = [
        _run(_decoder(on, bias=True, window=30, softcap=4.0), [(ids, 0, [1, 2, 3, 4])]) for on in every_cpu
    ]
    assert all(torch.equal(results[0], r) for r in results)


def test_chosen_rows_are_rows_of_all(cpu: Backend, draw: torch.Generator) -> None:
    decoder = _decoder(cpu)
    ids = torch.randint(VOCABULARY, (20,), generator=draw)
    every = _run(decoder, [(ids, 0, [0, 1])])
    positions = torch.arange(20)
    sequences = pack_sequences(np.array([0, 20]), np.array([0]), [np.array([0, 1])], BLOCK)
    rows = torch.tensor([19, 3, 3, 0])
    assert torch.equal(decoder.step(ids, positions, positions, sequences, rows), every[rows])
    assert decoder.step(ids, positions, positions, sequences, rows[:0]).shape == (0, VOCABULARY)


def test_times_of_parts_add_up_to_the_step(cpu: Backend, draw: torch.Generator) -> None:
    decoder = _decoder(cpu, int8=True, shape=replace(SHAPE, intermediate=96))
    ids = torch.randint(VOCABULARY, (41,), generator=draw)
    untimed = _run(decoder, [(ids, 0, [7, 3, 30])])
    decoder.times = times = StepTimes()
    started = time.perf_counter()
    timed = _run(decoder, [(ids, 0, [7, 3, 30])])
    took_ms = (time.perf_counter() - started) * 1e3
    decoder.times = None
    found = times.milliseconds()
    assert torch.equal(timed, untimed)
    assert tuple(found) == PARTS
    assert min(found.values()) > 0
    assert sum(found.values()) < took_ms
    _run(decoder, [(ids, 0, [7, 3, 30])])
    assert times.milliseconds() == found  # nobody asks any more


def test_parts_that_do_not_fit_are_refused(cpu: Backend) -> None:
    decoder = _decoder(cpu)
    layer = decoder.layers[0]
    with pytest.raises(ValueError, match="down is"):
        CompiledDecoder(
            SHAPE, [replace(layer, down=layer.qkv)], decoder.embedding, decoder.head, decoder.final_norm
        )
    with pytest.raises(ValueError, match="norms must be"):
        CompiledDecoder(
            SHAPE,
            [replace(layer, mlp_norm=torch.ones(3))],
            decoder.embedding,
            decoder.head,
            decoder.final_norm,
        )
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.60"):
        _run(decoder, [(torch.tensor([3, 61]), 0, [0])])
    with pytest.raises(ValueError, match="do not fit"):
        decoder.bind([torch.zeros(2, 2, 8, 16)] * 3, [torch.zeros(2, 2, 16, 8)] * 3)

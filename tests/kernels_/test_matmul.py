"""Products: right, and the same bits for any number of rows, threads, bytes a weight, any instructions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace_kernels import matmul
from headrace_kernels.dispatch import Backend
from headrace_kernels.matmul import reference

SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (7, 33, 20),
    (17, 31, 65),
    (1, 64, 192),
    (12, 100, 193),
    (13, 96, 400),
    (130, 40, 33),
]
QUANTISERS = {
    "q8_0": reference.quantize_q8_0,
    "q4_0": reference.quantize_q4_0,
    "q4_1": reference.quantize_q4_1,
}


def _random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


def _pack_any(weight: Tensor, storage: str, on: Backend) -> tuple[matmul.PackedWeight, Tensor]:
    """The packed weight and the fp32 weight it stands for."""
    if storage in QUANTISERS:
        blocks = QUANTISERS[storage](weight)
        return matmul.pack_blocks(blocks, storage, on=on), reference.dequantize(blocks, storage)
    kept = weight.to({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[storage])
    return matmul.pack(kept, on=on), kept.float()


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product_is_right_to_fp32(cpu: Backend, draw: torch.Generator, rows: int, n: int, k: int) -> None:
    x, w = _random(draw, rows, k), _random(draw, n, k)
    bias, residual = _random(draw, n), _random(draw, rows, n)
    y = matmul.linear(x, matmul.pack(w, bias, on=cpu), residual=residual)
    exact = (x.double() @ w.double().T + bias.double() + residual.double()).float()
    magnitude = x.abs().double() @ w.abs().double().T
    assert ((y - exact).abs() <= (k + 4) * 2**-24 * (magnitude + 8)).all()


@pytest.mark.parametrize("storage", ["bf16", "f16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 12, 29])
def test_stored_small_gives_the_bits_of_inflated_weights(
    cpu: Backend, draw: torch.Generator, storage: str, rows: int
) -> None:
    packed, inflated = _pack_any(_random(draw, 70, 256), storage, cpu)
    x = _random(draw, rows, 256)
    assert torch.equal(matmul.unpack(packed), inflated)
    assert torch.equal(matmul.linear(x, packed), matmul.linear(x, matmul.pack(inflated, on=cpu)))


@pytest.mark.parametrize("storage", ["f32", "bf16", "q8_0", "q4_1"])
def test_a_row_does_not_feel_the_other_rows(cpu: Backend, draw: torch.Generator, storage: str) -> None:
    packed, _ = _pack_any(_random(draw, 96, 416), storage, cpu)
    x = _random(draw, 512, 416)
    whole = matmul.linear(x, packed)
    for rows in [*range(1, 30), 48, 64, 96, 97, 200, 511]:
        start = 512 - rows
        assert torch.equal(matmul.linear(x[start:], packed), whole[start:]), rows


def test_threads_do_not_change_bits(cpu: Backend, draw: torch.Generator) -> None:
    assert cpu.native is not None
    packed = matmul.pack(_random(draw, 300, 200), on=cpu)
    x = _random(draw, 23, 200)
    results = []
    for threads in (1, 2, 3, 5):
        cpu.native.hr_set_threads(threads)
        results.append(matmul.linear(x, packed))
    cpu.native.hr_set_threads(2)
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("storage", ["f32", "bf16", "f16", "q8_0", "q4_0", "q4_1"])
def test_instruction_sets_agree(every_cpu: list[Backend], draw: torch.Generator, storage: str) -> None:
    weight, x = _random(draw, 70, 224), _random(draw, 15, 224)
    results = [matmul.linear(x, _pack_any(weight, storage, on)[0]) for on in every_cpu]
    assert all(torch.equal(results[0], r) for r in results)


def test_rows_choose_and_order_the_weights(cpu: Backend, draw: torch.Generator) -> None:
    w, x = _random(draw, 40, 24), _random(draw, 3, 24)
    packed = matmul.pack(w, rows=[39, -1, 0, 7], on=cpu)
    y = matmul.linear(x, packed)
    assert torch.equal(y[:, [0, 2, 3]], matmul.linear(x, matmul.pack(w, on=cpu))[:, [39, 0, 7]])
    assert not y[:, 1].any()


@pytest.mark.parametrize("storage", ["f32", "bf16", "f16", "q8_0", "q4_0", "q4_1"])
def test_gathered_rows_are_the_weights(cpu: Backend, draw: torch.Generator, storage: str) -> None:
    packed, inflated = _pack_any(_random(draw, 45, 64), storage, cpu)
    ids = torch.tensor([44, 0, 31, 32, 0])
    assert torch.equal(matmul.gather_rows(packed, ids), inflated[ids])
    assert matmul.gather_rows(packed, ids[:0]).shape == (0, 64)


def test_no_rows_give_no_rows(cpu: Backend, draw: torch.Generator) -> None:
    assert matmul.linear(torch.empty(0, 8), matmul.pack(_random(draw, 5, 8), on=cpu)).shape == (0, 5)


def test_strided_rows_and_a_residual_in_place(cpu: Backend, draw: torch.Generator) -> None:
    wide = _random(draw, 6, 50)
    x, packed = wide[:, 10:34], matmul.pack(_random(draw, 9, 24), on=cpu)
    expected = matmul.linear(x.contiguous(), packed) + 1
    y = torch.ones(6, 9)
    assert matmul.linear(x, packed, residual=y, out=y) is y
    assert torch.equal(y, expected)


def test_wrong_arguments_are_refused(cpu: Backend, draw: torch.Generator) -> None:
    w = _random(draw, 5, 8)
    packed = matmul.pack(w, on=cpu)
    with pytest.raises(ValueError, match="x must be fp32"):
        matmul.linear(torch.empty(2, 9), packed)
    with pytest.raises(ValueError, match="cannot be packed"):
        matmul.pack(w.double(), on=cpu)
    with pytest.raises(ValueError, match="bias"):
        matmul.pack(w, torch.empty(4), on=cpu)
    with pytest.raises(ValueError, match="ids must lie"):
        matmul.gather_rows(packed, torch.tensor([5]))
    with pytest.raises(ValueError, match="blocks are uint8"):
        matmul.pack_blocks(torch.empty(3, 33, dtype=torch.uint8), "q8_0", on=cpu)


def test_quantised_formats_are_those_of_gguf(draw: torch.Generator) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf.constants import GGMLQuantizationType

    w = _random(draw, 6, 96)
    for storage, quantise in QUANTISERS.items():
        blocks = quantise(w)
        theirs = quants.dequantize(blocks.numpy(), GGMLQuantizationType[storage.upper()])
        assert torch.equal(reference.dequantize(blocks, storage), torch.from_numpy(theirs)), storage

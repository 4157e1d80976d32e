"""Products with activations in bytes: exact integers, and bits that depend on a row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace_kernels import matmul
from headrace_kernels.dispatch import Backend
from headrace_kernels.matmul.reference import quantize_q4_0, quantize_q4_1, quantize_q8_0
from headrace_kernels.matmul_int8 import reference

SHAPES = [(1, 5, 32), (3, 33, 96), (7, 64, 800), (17, 31, 416), (130, 70, 64)]
QUANTISERS = {"q8_0": quantize_q8_0, "q4_0": quantize_q4_0, "q4_1": quantize_q4_1}


def _pack(blocks: Tensor, storage: str, on: Backend, bias: Tensor | None = None) -> matmul.PackedWeight:
    return matmul.pack_blocks(blocks, storage, bias, int8_activations=True, on=on)


def _random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


@pytest.mark.parametrize("storage", QUANTISERS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product_is_that_of_the_bytes(
    cpu: Backend, draw: torch.Generator, storage: str, rows: int, n: int, k: int
) -> None:
    x, bias = _random(draw, rows, k) * torch.logspace(-3, 3, k), _random(draw, n)
    blocks = QUANTISERS[storage](_random(draw, n, k))
    expected = reference.linear(x, blocks, storage) + bias
    got = matmul.linear(x, _pack(blocks, storage, cpu, bias))
    scale = reference.linear(x, blocks, storage).abs().amax() + 1
    assert float((got - expected).abs().max() / scale) < 2e-6


@pytest.mark.parametrize("storage", QUANTISERS)
def test_extreme_bytes_do_not_saturate(cpu: Backend, storage: str) -> None:
    """All weights and activations at the ends of their range, in every combination of signs."""
    blocks = QUANTISERS[storage](torch.tensor([[1.0, -1.0] * 32, [1.0] * 64, [-1.0] * 64]))
    if storage == "q8_0":
        blocks[2, 2:34] = 128  # -128, which quantisers avoid but files may hold
    x = torch.tensor([[1.0] * 64, [-1.0] * 64, [1.0, -1.0] * 32])
    got = matmul.linear(x, _pack(blocks, storage, cpu))
    assert torch.allclose(got.double(), reference.linear(x, blocks, storage), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("storage", QUANTISERS)
def test_a_row_does_not_feel_the_other_rows_or_threads(
    cpu: Backend, draw: torch.Generator, storage: str
) -> None:
    packed = _pack(QUANTISERS[storage](_random(draw, 70, 416)), storage, cpu)
    x = _random(draw, 200, 416) * torch.logspace(-2, 2, 200)[:, None]
    whole = matmul.linear(x, packed)
    for rows in [*range(1, 27), 48, 97, 199]:
        cpu.library.hr_set_threads(1 + rows % 3)
        assert torch.equal(matmul.linear(x[-rows:], packed), whole[-rows:]), rows
    cpu.library.hr_set_threads(2)


@pytest.mark.parametrize("storage", QUANTISERS)
def test_instruction_sets_agree(every_cpu: list[Backend], draw: torch.Generator, storage: str) -> None:
    blocks, x = QUANTISERS[storage](_random(draw, 70, 224)), _random(draw, 15, 224)
    results = [matmul.linear(x, _pack(blocks, storage, on)) for on in every_cpu]
    assert all(torch.equal(results[0], r) for r in results)


def test_what_is_not_finite_stays_in_its_row(cpu: Backend, draw: torch.Generator) -> None:
    packed = _pack(quantize_q8_0(_random(draw, 8, 64)), "q8_0", cpu)
    x = _random(draw, 4, 64)
    expected = matmul.linear(x, packed)
    x[1, 40], x[2, 3] = torch.nan, -torch.inf
    got = matmul.linear(x, packed)
    assert not got[1:3].isfinite().any()
    assert torch.equal(got[[0, 3]], expected[[0, 3]])


def test_a_row_of_zeros_is_zero(cpu: Backend, draw: torch.Generator) -> None:
    packed = _pack(quantize_q4_1(_random(draw, 8, 64)), "q4_1", cpu)
    assert not matmul.linear(torch.zeros(2, 64), packed).any()

"""Triton's norms, rotation, activations, products, draws and copies, on the card or under its interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_kernels import block_copy, gated_activation, matmul, rms_norm, rotary_kv, sampling

WHY = "triton is not installed"
norms: Any = pytest.importorskip("headrace_kernels.rms_norm.triton", reason=WHY)
activations: Any = pytest.importorskip("headrace_kernels.gated_activation.triton", reason=WHY)
rotaries: Any = pytest.importorskip("headrace_kernels.rotary_kv.triton", reason=WHY)
products: Any = pytest.importorskip("headrace_kernels.matmul.triton", reason=WHY)
draws: Any = pytest.importorskip("headrace_kernels.sampling.triton", reason=WHY)
copies: Any = pytest.importorskip("headrace_kernels.block_copy.triton", reason=WHY)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def random(draw: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=draw).to(dtype).to(DEVICE)


def agree(got: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype] * scale
    assert torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@every_dtype
@pytest.mark.parametrize("width", [1, 12, 33, 576])
def test_rms_norm(draw: torch.Generator, width: int, dtype: torch.dtype) -> None:
    x, residual = random(draw, 5, width, dtype=dtype), random(draw, 5, width, dtype=dtype)
    weight = random(draw, width, dtype=dtype)
    total = residual.clone()
    y = norms.rms_norm(x, weight, 1e-5, residual=total)
    agree(total, x.double() + residual.double(), dtype)
    agree(y, rms_norm.reference.rms_norm(total.double(), weight.double(), 1e-5), dtype)
    assert torch.equal(norms.rms_norm(total, weight, 1e-5), y)
    assert torch.equal(norms.rms_norm(total[2:3], weight, 1e-5), y[2:3])


@every_dtype
@pytest.mark.parametrize("activation", list(gated_activation.CODES))
def test_gated_activation(draw: torch.Generator, activation: str, dtype: torch.dtype) -> None:
    gate_up = 4 * random(draw, 3, 2 * 33, dtype=dtype)
    expected = gated_activation.reference.gated_activation(gate_up.double(), activation)
    agree(activations.gated_activation(gate_up, activation), expected, dtype)


@pytest.mark.parametrize("activation", list(gated_activation.CODES))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_activations_far_out(activation: str) -> None:
    gate = torch.tensor([[0.0, -200.0, 200.0, -1e30, 1e30, torch.nan]])
    both = torch.cat([gate, torch.ones(1, 6)], 1).to(DEVICE)
    got = activations.gated_activation(both, activation)[0].cpu()
    assert got[:5].tolist() == [0.0, 0.0, 200.0, 0.0, pytest.approx(1e30)]
    assert got[5].isnan()


@every_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("k_dim", "v_dim", "dims"), [(12, 12, 12), (20, 20, 8), (24, 16, 24)])
def test_rotation_and_write(
    draw: torch.Generator, interleaved: bool, k_dim: int, v_dim: int, dims: int, dtype: torch.dtype
) -> None:
    heads, kv_heads, block_size, tokens = 3, 2, 8, 7
    keys = random(draw, 9, kv_heads, k_dim, block_size, dtype=dtype)
    values = random(draw, 9, kv_heads, block_size, v_dim, dtype=dtype)
    angles = random(draw, 40, dims // 2)
    weights = random(draw, k_dim), random(draw, k_dim)
    positions = torch.randint(40, (tokens,), generator=draw).to(DEVICE)
    slots = torch.randperm(9 * block_size, generator=draw)[:tokens].to(DEVICE)
    q, k = random(draw, tokens, heads, k_dim, dtype=dtype), random(draw, tokens, kv_heads, k_dim, dtype=dtype)
    v = random(draw, tokens, kv_heads, v_dim, dtype=dtype)

    def prepare(x: Tensor, norm: Tensor) -> Tensor:
        normed = rms_norm.reference.rms_norm(x.double(), norm.double(), 1e-6)
        tables = angles[positions].cos().double(), angles[positions].sin().double()
        return rotary_kv.reference.rotate(normed, *tables, interleaved=interleaved)

    expected = rotary_kv.reference.write(keys, values, slots, prepare(k, weights[1]).to(dtype), v)
    how = rotaries.Rotary(angles.cos(), angles.sin(), interleaved, *weights, 1e-6)
    qkv = torch.cat([t.flatten(1) for t in (q, k, v)], 1)
    turned = rotaries.rotary_kv_write(qkv, how, positions, slots, keys, values, heads=heads)
    agree(turned, prepare(q, weights[0]), dtype, 4)
    agree(keys, expected[0], dtype, 4)
    assert torch.equal(values, expected[1])


def test_a_negative_slot_is_written_nowhere(draw: torch.Generator) -> None:
    keys, values = torch.zeros(2, 1, 8, 4, device=DEVICE), torch.zeros(2, 1, 4, 8, device=DEVICE)
    numbers = torch.tensor([-1, 5], device=DEVICE)
    rotaries.rotary_kv_write(random(draw, 2, 16), rotaries.Rotary(), numbers, numbers, keys, values, heads=0)
    assert int((keys != 0).sum()) == int((values != 0).sum()) == 8


@every_dtype
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 40), (70, 130)])
def test_products(draw: torch.Generator, n: int, k: int, dtype: torch.dtype) -> None:
    """Right, and each row's bits the same alone and at any place in any number of rows."""
    x, weight = random(draw, 19, k, dtype=dtype), random(draw, n, k, dtype=dtype)
    bias, residual = random(draw, n, dtype=dtype), random(draw, 19, n, dtype=dtype)
    whole = products.linear(x, weight, bias, residual)
    expected = matmul.reference.linear(*(t.double() for t in (x, weight, bias, residual)))
    agree(whole, expected, dtype, 5)
    for at, count in ((0, 1), (18, 1), (3, 7), (1, 16), (2, 17)):
        part = products.linear(x[at : at + count], weight, bias, residual[at : at + count])
        assert torch.equal(part, whole[at : at + count]), (at, count)


@pytest.mark.parametrize("width", [1, 15, 1024, 2500])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_argmax_and_log_sum_exp(draw: torch.Generator, width: int) -> None:
    wide = 5 * random(draw, 7, width + 3)
    wide[1, width // 2] = wide[1, 0] = 100.0  # two largest: the first counts
    wide[2, width - 1], wide[3, 0], wide[4, width // 2] = torch.nan, torch.inf, -torch.inf
    logits = wide[:, :width]
    ids, maxima = draws.argmax(logits)
    expected_ids, expected_maxima = sampling.reference.argmax(logits)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(maxima.nan_to_num(-1), expected_maxima.nan_to_num(-1))
    fine = [0, 1, 5, 6]
    got = draws.log_sum_exp(logits)[fine]
    assert torch.allclose(got.double(), sampling.reference.log_sum_exp(logits.double())[fine], rtol=2e-6)


def drawn(logits: Tensor, rows: list[tuple[float, int, float, float, float]]) -> list[int]:
    """Rows of (temperature, top_k, top_p, min_p, uniform)."""
    types = (torch.float32, torch.int32, torch.float64, torch.float32, torch.float64)
    columns = zip(*rows, strict=True)
    how = draws.Draws(*(torch.tensor(c, dtype=t).to(DEVICE) for c, t in zip(columns, types, strict=True)))
    return draws.draw(logits.to(DEVICE), how).tolist()


def expected_draw(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """By sorting, in fp64."""
    if temperature == 0:
        return int(row.argmax())
    scaled = ((row.max() - row) / temperature).neg().double()
    weights = scaled.exp()
    kept = torch.ones_like(weights, dtype=torch.bool)
    if 0 < top_k < len(row):
        kept &= scaled >= scaled.topk(top_k).values[-1]
    if top_p < 1.0:
        ordered, order = (weights * kept).sort(descending=True)
        enough = int((ordered.cumsum(0) >= top_p * ordered.sum()).nonzero()[0])
        kept &= scaled >= scaled[order[enough]]
    kept &= weights >= min_p
    cumulative = (weights * kept).cumsum(0)
    return int((cumulative > u * cumulative[-1]).nonzero()[0])


FILTERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (0.9, 40, 0.6, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.8, 30, 0.95, 0.01),
    (2.0, 1, 1.0, 0.0),
]


@pytest.mark.parametrize("width", [7, 1100])
def test_draws_are_those_of_a_sort(draw: torch.Generator, width: int) -> None:
    uniforms = torch.rand(2, generator=draw, dtype=torch.float64).tolist()
    rows = [(*f, u) for f in FILTERS for u in uniforms]
    logits = 2 * torch.randn(len(rows), width, generator=draw)
    logits[::4, 1] = -torch.inf
    logits[5] = logits[5].round()  # many equals at the limits
    got = drawn(logits, rows)
    assert got == [expected_draw(row, *how) for row, how in zip(logits, rows, strict=True)]
    for i in (8, 13):
        assert drawn(logits[i : i + 1], rows[i : i + 1]) == got[i : i + 1]


def test_draws_at_the_ends(draw: torch.Generator) -> None:
    logits = torch.randn(1, 1100, generator=draw)
    banned = torch.full((1, 1100), -torch.inf)
    banned[0, 1050] = -3.0
    assert drawn(logits, [(1.0, 0, 1.0, 0.0, 0.0)]) == [0]
    assert drawn(logits, [(1.0, 0, 1.0, 0.0, 1 - 2**-53)]) == [1099]
    assert drawn(banned, [(1.0, 3, 0.9, 0.1, 1 - 2**-53)]) == [1050]
    assert drawn(torch.full((1, 3), -torch.inf), [(1.0, 0, 1.0, 0.0, 0.5)]) == [-1]
    assert drawn(torch.tensor([[0.0, torch.nan]]), [(1.0, 0, 1.0, 0.0, 0.5)]) == [-1]


def test_block_copies(draw: torch.Generator) -> None:
    caches = [random(draw, 6, 2, 3, 4), random(draw, 6, 2, 5, dtype=torch.float16)]
    pairs = [(0, 3), (0, 5), (4, 1)]
    expected = [block_copy.reference.copy_blocks(cache, pairs) for cache in caches]
    copies.copy_blocks(caches, pairs)
    copies.copy_blocks(caches, [])
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    for wrong in ([(0, 1), (1, 2)], [(0, 2), (1, 2)], [(0, 6)]):
        with pytest.raises(ValueError):
            copies.copy_blocks(caches, wrong)

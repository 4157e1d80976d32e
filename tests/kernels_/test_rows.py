"""The operations on single rows: norms, rotation with the KV write, activations, argmax, block copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace_kernels import block_copy, gated_activation, rms_norm, rotary_kv, sampling
from headrace_kernels.dispatch import Backend

ROWS = [1, 3, 7, 17]
WIDTHS = [1, 12, 16, 33, 576]


def _random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(cpu: Backend, draw: torch.Generator, rows: int, width: int) -> None:
    x, residual, weight = _random(draw, rows, width), _random(draw, rows, width), _random(draw, width)
    expected = rms_norm.reference.rms_norm(x.double(), weight.double(), 1e-5, residual.double()).float()
    total = residual.clone()
    y = rms_norm.rms_norm(x, weight, 1e-5, residual=total, on=cpu)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(rms_norm.rms_norm(total, weight, 1e-5, on=cpu), y)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("k_dim", "v_dim", "dims"), [(12, 12, 12), (20, 20, 8), (64, 64, 64), (24, 16, 24)])
@pytest.mark.parametrize("tokens", ROWS)
def test_rotation_and_write(
    cpu: Backend, draw: torch.Generator, interleaved: bool, k_dim: int, v_dim: int, dims: int, tokens: int
) -> None:
    heads, kv_heads, block_size = 6, 2, 8
    keys, values = (
        _random(draw, 9, kv_heads, k_dim, block_size),
        _random(draw, 9, kv_heads, block_size, v_dim),
    )
    angles = _random(draw, 40, dims // 2)
    norms = _random(draw, k_dim), _random(draw, k_dim)
    positions = torch.randint(40, (tokens,), generator=draw)
    slots = torch.randperm(9 * block_size, generator=draw)[:tokens]
    q, k = _random(draw, tokens, heads, k_dim), _random(draw, tokens, kv_heads, k_dim)
    v = _random(draw, tokens, kv_heads, v_dim)

    def prepare(x: Tensor, norm: Tensor) -> Tensor:
        normed = rms_norm.reference.rms_norm(x, norm, 1e-6)
        tables = angles[positions].cos(), angles[positions].sin()
        return rotary_kv.reference.rotate(normed, *tables, interleaved=interleaved)

    expected = rotary_kv.reference.write(keys, values, slots, prepare(k, norms[1]), v)
    qkv = torch.cat([t.flatten(1) for t in (q, k, v)], 1)
    how = rotary_kv.rotary(
        angles.cos(), angles.sin(), interleaved=interleaved, q_norm=norms[0], k_norm=norms[1], epsilon=1e-6
    )
    rotary_kv.rotary_kv_write(qkv, how, positions, slots, keys, values, heads=heads, on=cpu)
    turned = qkv[:, : heads * k_dim].view(tokens, heads, k_dim)
    assert torch.allclose(turned, prepare(q, norms[0]), rtol=1e-5, atol=1e-5)
    assert torch.allclose(keys, expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(values, expected[1])


def test_without_tables_or_norms_heads_stay_as_they_are(cpu: Backend, draw: torch.Generator) -> None:
    qkv = _random(draw, 3, 4 * 8)
    before = qkv.clone()
    keys, values = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 16, 8)
    numbers = torch.arange(3)
    rotary_kv.rotary_kv_write(
        qkv, rotary_kv.rotary(None, None), numbers, numbers, keys, values, heads=2, on=cpu
    )
    assert torch.equal(qkv, before)
    assert torch.equal(keys[0, 0, :, :3].T, before[:, 16:24])


def test_positions_past_the_tables_are_refused(cpu: Backend) -> None:
    how = rotary_kv.rotary(torch.ones(4, 4), torch.zeros(4, 4))
    caches = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 16, 8)
    with pytest.raises(ValueError, match="position 4 is past"):
        rotary_kv.rotary_kv_write(
            torch.zeros(1, 32), how, torch.tensor([4]), torch.tensor([0]), *caches, heads=2, on=cpu
        )


@pytest.mark.parametrize("activation", list(gated_activation.CODES))
@pytest.mark.parametrize("rows", ROWS)
def test_gated_activation(cpu: Backend, draw: torch.Generator, activation: str, rows: int) -> None:
    gate_up = 4 * _random(draw, rows, 2 * 33)
    expected = gated_activation.reference.gated_activation(gate_up.double(), activation).float()
    got = gated_activation.gated_activation(gate_up, activation, on=cpu)
    assert torch.allclose(got, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("activation", list(gated_activation.CODES))
def test_activations_far_out(cpu: Backend, activation: str) -> None:
    gate = torch.tensor([[0.0, -200.0, 200.0, -1e30, 1e30, torch.nan]])
    got = gated_activation.gated_activation(torch.cat([gate, torch.ones(1, 6)], 1), activation, on=cpu)[0]
    assert got[:5].tolist() == [0.0, 0.0, 200.0, 0.0, pytest.approx(1e30)]
    assert got[5].isnan()


@pytest.mark.parametrize("width", [1, 15, 16, 100, 49_152])
def test_argmax_and_log_sum_exp(cpu: Backend, draw: torch.Generator, width: int) -> None:
    wide = 5 * _random(draw, 7, width + 3)
    wide[1, width // 2] = wide[1, 0] = 100.0  # two largest: the first counts
    wide[2, width - 1], wide[3, 0], wide[4, width // 2] = torch.nan, torch.inf, -torch.inf
    logits = wide[:, :width]
    ids, maxima = sampling.argmax(logits, on=cpu)
    expected_ids, expected_maxima = sampling.reference.argmax(logits)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(maxima.nan_to_num(-1), expected_maxima.nan_to_num(-1))
    got = sampling.log_sum_exp(logits, on=cpu)[[0, 1, 5, 6]]
    assert torch.allclose(
        got, sampling.reference.log_sum_exp(logits.double()).float()[[0, 1, 5, 6]], rtol=2e-6
    )


def test_log_sum_exp_of_a_row_alone(cpu: Backend, draw: torch.Generator) -> None:
    logits = _random(draw, 5, 1000)
    whole = sampling.log_sum_exp(logits, on=cpu)
    assert all(torch.equal(sampling.log_sum_exp(logits[i : i + 1], on=cpu)[0], whole[i]) for i in range(5))


def test_instruction_sets_agree(every_cpu: list[Backend], draw: torch.Generator) -> None:
    x, weight = _random(draw, 7, 100), _random(draw, 100)
    operations: list[Callable[[Backend], Tensor]] = [
        lambda on: rms_norm.rms_norm(x, weight, 1e-5, on=on),
        lambda on: sampling.log_sum_exp(x, on=on),
        *(lambda on, a=a: gated_activation.gated_activation(x, a, on=on) for a in gated_activation.CODES),
    ]
    for operation in operations:
        results = [operation(on) for on in every_cpu]
        assert all(torch.equal(results[0], r) for r in results)


def test_block_copies(cpu: Backend, draw: torch.Generator) -> None:
    caches = [_random(draw, 6, 2, 3, 4), _random(draw, 6, 2, 5)]
    pairs = [(0, 3), (0, 5), (4, 1)]
    expected = [block_copy.reference.copy_blocks(cache, pairs) for cache in caches]
    block_copy.copy_blocks(caches, pairs, on=cpu)
    block_copy.copy_blocks(caches, [], on=cpu)
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    for wrong in ([(0, 1), (1, 2)], [(0, 2), (1, 2)], [(0, 6)]):
        with pytest.raises(ValueError):
            block_copy.copy_blocks(caches, wrong, on=cpu)

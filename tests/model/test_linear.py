"""Products whose rows do not depend on the row count, and activations that do not depend on the place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worker.model.elementwise import GRAIN, VECTOR, AlignedActivation, align_activations, aligned_count
from worker.model.linear import ExactLinear, PackedProduct, PlainProduct, replace_linears, row_counts_agree

SHAPES = [(1536, 576), (576, 192), (33, 7), (1, 1), (96, 40), (2048, 64), (17, 512)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_the_same_in_any_company(k: int, n: int, threads: int) -> None:
    torch.manual_seed(k)
    layer = nn.Linear(k, n)
    model = nn.Sequential(layer)
    expected = layer.weight.detach().double(), layer.bias.detach().double()
    report = replace_linears(model, threads)
    assert (report.replaced, report.exact) == (1, True)
    x = torch.randn(1100, k)
    torch.set_num_threads(threads)
    whole = model(x)
    assert torch.allclose(whole.double(), x.double() @ expected[0].T + expected[1], atol=1e-3)
    torch.set_num_threads(1)
    for rows in (0, 1, 2, 3, 4, 6, 15, 31, 65, 512, 513, 514, 1025):
        assert torch.equal(model(x[:rows]), whole[:rows])
    assert torch.equal(model(x[7:8]), whole[7:8])
    assert torch.equal(model(x[None, 3:9]), whole[None, 3:9])


def test_the_self_test_sees_a_product_that_depends_on_the_row_count() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    plain = PlainProduct(weight, None)

    def by_count(x: torch.Tensor) -> torch.Tensor:
        return plain(x) * (1.0 if len(x) > 3 else 1.0 + 2.0**-20)

    assert not row_counts_agree(by_count, 96, 1)
    assert row_counts_agree(PackedProduct(weight, None, 2), 96, 2)


def test_a_replaced_layer_has_a_weight_in_name_only() -> None:
    layer = ExactLinear(PlainProduct(torch.ones(3, 2), None), 2, 3, torch.float32)
    assert (layer.weight.shape, layer.weight.dtype) == ((3, 2), torch.float32)
    assert layer.weight.is_meta, "a value read from it would be wrong, so it must have none"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [1, 7, 40, 160, 100])
def test_activations_do_not_depend_on_the_place(width: int, threads: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.SiLU())
    assert align_activations(model) == 1
    x = torch.randn(900, width) * 3
    whole = model(x)
    torch.set_num_threads(threads)
    for first, last in ((0, 1), (3, 4), (0, 441), (899, 900), (5, 808)):
        assert torch.equal(model(x[first:last]), whole[first:last])


def test_a_strided_input_is_the_same() -> None:
    torch.manual_seed(1)
    act = AlignedActivation(nn.GELU(approximate="tanh"))
    both = torch.randn(50, 74)
    assert torch.equal(act(both[:, :37]), act(both[:, :37].contiguous()))


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("count", [0, 1, 31, 32, GRAIN, GRAIN + 1, 441 * 160, 3 * GRAIN - 5, 1_000_003])
def test_every_thread_gets_whole_vectors(count: int, threads: int) -> None:
    padded = aligned_count(count, threads)
    assert padded >= count
    shares = max(1, min(threads, -(-padded // GRAIN)))
    assert padded % (VECTOR * shares) == 0
    assert aligned_count(padded, threads) == padded

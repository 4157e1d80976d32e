"""Linear layers whose rows do not depend on how many rows are computed together.

`F.linear` picks another kernel for a few rows than for many, so a token's bits would depend on the batch. On
the CPU every `nn.Linear` (and GPT-2's `Conv1D`) is replaced by one of the backends below; `choose_product` is
the only place that knows them. A product is used only after `row_counts_agree` has compared its rows over
many row counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from worker.model.threads import torch_threads

MAX_ROWS = 512
ROW_PADDINGS = (2, 4, 8, 16)
PROBED_ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 33)
_WIDE = 16_384  # outputs from which on fewer row counts are probed, to save time


class Product(Protocol):
    """x [rows, in] fp32 → [rows, out] fp32 for one fixed weight [out, in] and bias [out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PackedProduct:
    """oneDNN's product with a weight packed once; never fewer than `min_rows` rows, never more than 512."""

    def __init__(self, weight: Tensor, bias: Tensor | None, min_rows: int = 2) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach().contiguous()
        self.out_features = weight.shape[0]
        self.min_rows = min_rows

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if self.min_rows <= rows <= MAX_ROWS:
            return self._multiply(x)
        if rows == 0:
            return x.new_empty(0, self.out_features)
        if rows < self.min_rows:
            padded = x.new_zeros(self.min_rows, x.shape[1])
            padded[:rows] = x
            return self._multiply(padded)[:rows]
        return torch.cat([self(part) for part in x.split(MAX_ROWS)])

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class PlainProduct:
    """torch's own product: the portable way, whose bits may depend on the row count."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.detach(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class ExactLinear(nn.Module):
    """Stands in for a linear layer. `weight` has its shape and dtype only, for models that ask."""

    def __init__(self, product: Product, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.product = product
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and x.is_contiguous():
            return self.product(x)
        rows = self.product(x.reshape(-1, self.in_features).contiguous())
        return rows.view(*x.shape[:-1], self.out_features)


def row_counts_agree(product: Product, in_features: int, threads: int) -> bool:
    """Whether rows have the same bits alone and among many, at any place, on one thread and on `threads`."""
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(max(PROBED_ROW_COUNTS) + 1, in_features, generator=generator)
    with torch_threads(1):
        whole = product(x)
    counts = PROBED_ROW_COUNTS if whole.shape[1] < _WIDE else PROBED_ROW_COUNTS[:8:2]
    with torch_threads(threads):
        return all(
            torch.equal(product(x[at : at + n].contiguous()), whole[at : at + n])
            for n in counts
            for at in (0, x.shape[0] - n)
        )


@dataclass(frozen=True, slots=True)
class LinearReport:
    """What became of a model's linear layers. `inexact` names the weight shapes whose rows may differ."""

    backend: str
    replaced: int
    inexact: tuple[tuple[int, int], ...]

    @property
    def exact(self) -> bool:
        return not self.inexact


def choose_product(
    weight: Tensor, bias: Tensor | None, min_rows: int | None, threads: int
) -> tuple[Product, int | None]:
    """The product for a weight [out, in], and its row padding (None: no padding made its rows agree).

    `min_rows` is the padding already found for this shape, or None to search.
    """
    if min_rows is not None:
        return PackedProduct(weight, bias, min_rows), min_rows
    product = PackedProduct(weight, bias)
    for padding in ROW_PADDINGS:
        product.min_rows = padding
        if row_counts_agree(product, weight.shape[1], threads):
            return product, padding
    return product, None


def replace_linears(model: nn.Module, threads: int) -> LinearReport:
    """Replace every linear layer of a CPU fp32 model in place; each weight is freed once it is packed.

    `threads`: how many the model will run on.
    """
    paddings: dict[tuple[int, int], int | None] = {}
    replaced = 0
    for parent, name, layer in list(_linears(model)):
        weight = _weight_of(layer)
        shape = (weight.shape[0], weight.shape[1])
        product, padding = choose_product(weight, _bias_of(layer), paddings.get(shape), threads)
        paddings[shape] = padding
        setattr(parent, name, ExactLinear(product, shape[1], shape[0], weight.dtype))
        replaced += 1
    inexact = tuple(shape for shape, padding in paddings.items() if padding is None)
    return LinearReport("onednn", replaced, inexact)


def packing_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear or type(layer).__name__ == "Conv1D":
                yield parent, name, layer


def _bias_of(layer: nn.Module) -> Tensor | None:
    bias = layer.bias
    return bias if isinstance(bias, Tensor) else None


def _weight_of(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight if type(layer) is nn.Linear else weight.t()  # Conv1D keeps [in, out]

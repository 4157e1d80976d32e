"""In which form a matrix is kept for the compiled products: as its file has it, unless asked otherwise.

A GGUF file's blocks are taken as they are, where they are shown to inflate to the very weights of the model.
Weights that came from a bf16 or fp16 checkpoint go back to two bytes, where that is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from headrace_kernels import matmul
from headrace_kernels.matmul.reference import (
    GROUP,
    dequantize,
    quantize_q4_0,
    quantize_q8_0,
)
from worker.model.gguf_index import read_index

log = structlog.get_logger()
SAMPLED_ROWS = 48  # compared before blocks are taken for a weight's


@dataclass(frozen=True, slots=True)
class Forms:
    """What is asked for. Everything but `auto` with `fp32` trades exactness of the weights or activations."""

    weights: str = "auto"  # as the file has them; or fp32, bf16, q8, q4
    activations: str = "fp32"  # or int8: in bytes, over weights in blocks

    def __post_init__(self) -> None:
        if self.weights not in ("auto", "fp32", "bf16", "q8", "q4"):
            raise ValueError(f"weights {self.weights!r}: give auto, fp32, bf16, q8 or q4")
        if self.activations not in ("fp32", "int8"):
            raise ValueError(f"activations {self.activations!r}: give fp32 or int8")

    @property
    def lossless(self) -> bool:
        return self.weights in ("auto", "fp32") and self.activations == "fp32"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [n, k], as fp32, bf16 or fp16 elements, or as GGUF blocks of a storage of `matmul`."""

    data: Tensor
    storage: str  # "dense", or "q8_0", "q4_0", "q4_1"
    int8_activations: bool = False

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    def inflated(self) -> Tensor:
        return self.data.float() if self.storage == "dense" else dequantize(self.data, self.storage)

    def pack(self, bias: Tensor | None = None, rows: Sequence[int] | None = None) -> matmul.PackedWeight:
        if self.storage == "dense":
            return matmul.pack(self.data, bias, rows=rows)
        return matmul.pack_blocks(
            self.data, self.storage, bias, rows=rows, int8_activations=self.int8_activations
        )


def stack(parts: Sequence[Matrix]) -> Matrix:
    """The rows of all parts; inflated if they are not stored alike."""
    if len(parts) == 1:
        return parts[0]
    if len({(p.storage, p.data.dtype) for p in parts}) == 1:
        return replace(parts[0], data=torch.cat([p.data for p in parts]))
    return Matrix(torch.cat([p.inflated() for p in parts]), "dense")


def narrowed(weight: Tensor) -> Matrix:
    """The weight in two bytes an element, if those hold it exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        sample = weight[:: max(1, weight.shape[0] // 4)]
        if torch.equal(sample.to(dtype).float(), sample):
            small = weight.to(dtype)
            if torch.equal(small.float(), weight):
                return Matrix(small, "dense")
    return Matrix(weight, "dense")


def in_form(matrix: Matrix, forms: Forms) -> Matrix:
    """The matrix as asked for; blocks need whole groups, so odd widths stay as they are."""
    grouped = matrix.storage != "dense" or matrix.data.shape[1] % GROUP == 0
    if forms.weights == "fp32":
        matrix = Matrix(matrix.inflated(), "dense")
    elif forms.weights == "bf16":
        matrix = Matrix(matrix.inflated().to(torch.bfloat16), "dense")
    elif forms.weights == "q4" and grouped and matrix.storage not in ("q4_0", "q4_1"):
        matrix = Matrix(quantize_q4_0(matrix.inflated()), "q4_0")
    elif forms.weights == "q8" and grouped and matrix.storage != "q8_0":
        matrix = Matrix(quantize_q8_0(matrix.inflated()), "q8_0")
    if forms.activations == "int8" and grouped:
        if matrix.storage == "dense":
            matrix = Matrix(quantize_q8_0(matrix.inflated()), "q8_0")
        matrix = replace(matrix, int8_activations=True)
    return matrix


class WeightSource:
    """Matrices of a model's modules. `gguf`: the file its weights were inflated from, if any."""

    def __init__(self, model: nn.Module, gguf: Path | None, forms: Forms) -> None:
        self.forms = forms
        self._names = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
        self._blocks: Mapping[str, Any] = {}
        if gguf is not None:
            self._blocks = _read_blocks(model, gguf)

    def matrix(self, module: nn.Module, heads: int | None = None) -> Matrix:
        """The weight of a linear layer or embedding; `heads`: its rows may be pairs of rotated dimensions."""
        weight: Tensor = module.weight.detach()  # type: ignore[operator]
        tensor = self._blocks.get(self._names.get(id(module.weight), ""))
        kept = _matching_blocks(tensor, weight, heads) if tensor is not None else None
        return in_form(kept or narrowed(weight), self.forms)


def _read_blocks(model: Any, gguf: Path) -> dict[str, Any]:
    """The file's quantised tensors by the model's parameter names, as far as they are known."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    index = read_index(gguf)
    named = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    arch = named.get(index.architecture)
    if arch is None:
        return {}
    names = get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    tensors = {t.name: t for t in index.tensors if t.tensor_type.name.lower() in matmul.STORAGES}
    found = {}
    for name, _ in model.named_parameters():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs in tensors:
            found[name] = tensors[theirs]
    return found


def _matching_blocks(tensor: Any, weight: Tensor, heads: int | None) -> Matrix | None:
    storage = tensor.tensor_type.name.lower()
    if storage not in ("q8_0", "q4_0", "q4_1"):
        return None
    blocks = torch.from_numpy(np.array(tensor.data)).view(weight.shape[0], -1)
    sample = torch.linspace(0, weight.shape[0] - 1, min(SAMPLED_ROWS, weight.shape[0])).long()
    for order in _row_orders(weight.shape[0], heads):
        if torch.equal(dequantize(blocks[order[sample]], storage), weight[sample]):
            return Matrix(blocks[order].contiguous(), storage)
    log.warning("gguf_blocks_do_not_match", tensor=tensor.name)
    return None


def _row_orders(rows: int, heads: int | None) -> list[Tensor]:
    """As they are, or with the two halves of each head interleaved, as llama.cpp stores queries and keys."""
    plain = torch.arange(rows)
    if heads is None or rows % (2 * heads):
        return [plain]
    return [plain, plain.view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()]

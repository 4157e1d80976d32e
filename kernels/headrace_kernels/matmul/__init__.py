"""y = x Wᵀ (+ bias) (+ residual) in fp32 arithmetic, with weights kept as the checkpoint has them.

Bits of a row do not depend on the other rows, on threads, on the instruction set, or on the form weights are
stored in: each element is one chain of fused multiply-adds in the order of k.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..dispatch import Backend, backend
from ..native import structs
from . import reference

STORAGES: Final = {"f32": 0, "bf16": 1, "f16": 2, "q8_0": 3, "q4_0": 4, "q4_1": 5}
_DENSE: Final = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_BLOCK_BYTES: Final = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
GROUP: Final = 32
PANEL: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """W [n, k] in panels of 32 columns, for the compiled kernels. Build with `pack` or `pack_blocks`."""

    n: int
    k: int
    storage: str
    panels: Tensor  # uint8, the layout of storage.h
    bias: Tensor | None  # fp32 [n]
    int8_activations: bool  # see matmul_int8
    backend: Backend
    struct: structs.Weight  # points into panels and bias

    @property
    def nbytes(self) -> int:
        return self.panels.numel()


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Sequence[int] | None = None,
    on: Backend | None = None,
) -> PackedWeight:
    """Packs weight [n, k] (fp32, bf16 or fp16, kept as it is). Copies.

    `rows` chooses and orders W's rows (-1: a row of zeros); bias is [len(rows)].
    """
    storage = _DENSE.get(weight.dtype)
    if storage is None:
        raise ValueError(f"weights of {weight.dtype} cannot be packed, only float32, bfloat16, float16")
    if weight.ndim != 2:
        raise ValueError(f"a weight has two dimensions, not {weight.ndim}")
    return _pack(weight.contiguous(), storage, weight.shape[1], bias, rows, False, on)


def pack_blocks(
    blocks: Tensor,
    storage: str,
    bias: Tensor | None = None,
    *,
    rows: Sequence[int] | None = None,
    int8_activations: bool = False,
    on: Backend | None = None,
) -> PackedWeight:
    """Packs GGUF blocks [n, bytes a row] uint8 of "q8_0", "q4_0" or "q4_1", without inflating them.

    `int8_activations`: products take their activations in bytes too (matmul_int8).
    """
    if storage not in _BLOCK_BYTES:
        raise ValueError(f"storage {storage!r} is none of {', '.join(_BLOCK_BYTES)}")
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] % _BLOCK_BYTES[storage]:
        raise ValueError(f"{storage} blocks are uint8 [n, multiple of {_BLOCK_BYTES[storage]}]")
    k = blocks.shape[1] // _BLOCK_BYTES[storage] * GROUP
    return _pack(blocks.contiguous(), storage, k, bias, rows, int8_activations, on)


def _pack(
    source: Tensor,
    storage: str,
    k: int,
    bias: Tensor | None,
    rows: Sequence[int] | None,
    int8: bool,
    on: Backend | None,
) -> PackedWeight:
    chosen = on or backend()
    order = torch.arange(source.shape[0]) if rows is None else torch.tensor(rows, dtype=torch.int64)
    n = order.numel()
    if n == 0 or k == 0:
        raise ValueError("an empty weight cannot be packed")
    if int(order.max()) >= source.shape[0] or int(order.min()) < -1:
        raise ValueError("rows name rows the weight does not have")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, not ({n},)")
    native = chosen.library
    code = STORAGES[storage]
    panels = aligned_bytes(native, native.hr_packed_bytes(code, n, k))
    row_bytes = source.stride(0) * source.element_size()
    native.hr_pack(code, n, k, source.data_ptr(), row_bytes, order.data_ptr(), panels.data_ptr())
    kept = None if bias is None else bias.detach().to(torch.float32).contiguous()
    return from_panels(panels, n, k, storage, kept, int8_activations=int8, on=chosen)


def from_panels(
    panels: Tensor,
    n: int,
    k: int,
    storage: str,
    bias: Tensor | None,
    *,
    int8_activations: bool = False,
    on: Backend | None = None,
) -> PackedWeight:
    """What `pack` made, from its panels (they begin on a cache line) and bias. Raises ValueError."""
    chosen, code = on or backend(), STORAGES[storage]
    if panels.numel() != chosen.library.hr_packed_bytes(code, n, k) or panels.data_ptr() % 64:
        raise ValueError(f"{panels.numel()} bytes are no panels of {storage} [{n}, {k}]")
    address = 0 if bias is None else bias.data_ptr()
    struct = structs.Weight(code, n, k, int8_activations, panels.data_ptr(), address)
    return PackedWeight(n, k, storage, panels, bias, int8_activations, chosen, struct)


def aligned_bytes(native: ctypes.CDLL, size: int) -> Tensor:
    """Bytes that begin on a cache line; large ones on huge pages, before they are first touched."""
    raw = torch.empty(size + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    native.hr_use_huge_pages(raw.data_ptr(), raw.numel())
    return raw[start : start + size]


def linear(
    x: Tensor, weight: PackedWeight, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [rows, k] fp32 → [rows, n] fp32; residual [rows, n] is added last and may be `out` itself."""
    if x.ndim != 2 or x.shape[1] != weight.k or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"x must be fp32 [rows, {weight.k}] on the CPU, not {x.dtype} {tuple(x.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape[0], weight.n) if out is None else out
    for name, t in (("out", y), ("residual", residual)):
        if t is not None and (t.shape != (x.shape[0], weight.n) or t.dtype != x.dtype or t.stride(1) != 1):
            raise ValueError(f"{name} must be fp32 [{x.shape[0]}, {weight.n}] with adjacent columns")
    added, ld_added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    weight.backend.library.hr_linear(
        ctypes.byref(weight.struct),
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        y.data_ptr(),
        y.stride(0),
        added,
        ld_added,
    )
    return y


def unpack(weight: PackedWeight) -> Tensor:
    """The weights [n, k] in fp32: the bits that products use."""
    out = torch.empty(weight.n, weight.k)
    weight.backend.library.hr_unpack(ctypes.byref(weight.struct), out.data_ptr())
    return out


def gather_rows(weight: PackedWeight, ids: Tensor) -> Tensor:
    """Rows `ids` (int64 [count]) of W in fp32 [count, k]: an embedding table in the head's memory."""
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise ValueError("ids must be int64 [count]")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
        raise ValueError(f"ids must lie in 0..{weight.n - 1}")
    out = torch.empty(ids.numel(), weight.k)
    ids = ids.contiguous()
    weight.backend.library.hr_gather_rows(
        ctypes.byref(weight.struct), ids.data_ptr(), ids.numel(), out.data_ptr()
    )
    return out


__all__ = [
    "PackedWeight",
    "aligned_bytes",
    "from_panels",
    "gather_rows",
    "linear",
    "pack",
    "pack_blocks",
    "reference",
    "unpack",
]

"""One step of a Llama-like decoder in one call: all layers over packed tokens, and the logits of chosen rows.

`CompiledDecoder` is made once from packed weights; `bind` names the KV caches it reads and writes. The
options cover biases, head norms, norms after blocks, windows for each layer, caps, scales and layers without
rotation; reference.py is the same in plain torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..gated_activation import CODES
from ..matmul import PANEL, PackedWeight
from ..native import structs
from ..paged_attention import PackedSequences, Scales, attention_shape, kv_cache
from . import reference

# What a step's time goes to, as `StepTimes` counts it; decoder.h has the same order.
PARTS: Final = (
    "embedding",
    "norms",
    "query, key, value",
    "rotary, KV write",
    "attention",
    "attention output",
    "gate, up, activation",
    "down",
    "head",
)


class StepTimes:
    """Adds up where the time of steps goes, part by part, while it is some decoder's `times`."""

    def __init__(self) -> None:
        self._nanoseconds = (ctypes.c_int64 * len(PARTS))()

    @property
    def address(self) -> int:
        return ctypes.addressof(self._nanoseconds)

    def milliseconds(self) -> dict[str, float]:
        return {part: ns / 1e6 for part, ns in zip(PARTS, self._nanoseconds, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Norms are effective weights (1 + w where a family stores w), fp32 [hidden] or [k_dim]."""

    qkv: PackedWeight  # queries, keys, values
    output: PackedWeight
    gate_up: PackedWeight  # rows in the order of `gate_up_rows`
    down: PackedWeight
    attention_norm: Tensor
    mlp_norm: Tensor
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    rotary_table: int | None = 0  # which of the tables given to `bind`; None: no rotation
    rotary_interleaved: bool = False
    head_norm_epsilon: float = 1e-6
    scale: float = 1.0
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden: int
    intermediate: int
    heads: int
    activation: str
    epsilon: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0


def gate_up_rows(intermediate: int) -> list[int]:
    """The order of rows in which [gates; ups] are packed: panels of gates and of ups in turn, padded (-1)."""
    rows: list[int] = []
    for first in range(0, intermediate, PANEL):
        units = [i if i < intermediate else None for i in range(first, first + PANEL)]
        rows += [-1 if i is None else i for i in units]
        rows += [-1 if i is None else intermediate + i for i in units]
    return rows


class CompiledDecoder:
    """Not for two threads at once; two decoders are."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        embedding: PackedWeight,
        head: PackedWeight,
        final_norm: Tensor,
    ) -> None:
        self.shape, self.layers = shape, tuple(layers)
        self.embedding, self.head, self.final_norm = embedding, head, final_norm
        self.library = head.backend.library
        self._layers = (structs.Layer * len(layers))(*map(self._layer, layers))
        self._decoder = structs.Decoder(
            shape.hidden,
            shape.intermediate,
            len(layers),
            CODES[shape.activation],
            shape.epsilon,
            shape.embedding_scale,
            shape.residual_scale,
            shape.logit_scale,
            shape.logit_softcap,
            structs.AttentionShape(),
            self._layers,
            ctypes.pointer(embedding.struct),
            ctypes.pointer(head.struct),
            final_norm.data_ptr(),
        )
        self._caches: tuple[object, ...] = ()  # kept alive for the structs
        self._tables: tuple[tuple[Tensor, Tensor], ...] = ()
        self.times: StepTimes | None = None  # set by whoever wants to know

    def _layer(self, layer: LayerWeights) -> structs.Layer:
        self._check(layer)
        rotary = structs.RotaryOptions(
            None,
            None,
            0,
            int(layer.rotary_interleaved),
            _address(layer.q_norm),
            _address(layer.k_norm),
            layer.head_norm_epsilon,
        )
        attention = structs.AttentionOptions(layer.scale, layer.softcap, layer.window, _address(layer.sinks))
        return structs.Layer(
            layer.qkv.struct,
            layer.output.struct,
            layer.gate_up.struct,
            layer.down.struct,
            _address(layer.attention_norm),
            _address(layer.attention_post_norm),
            _address(layer.mlp_norm),
            _address(layer.mlp_post_norm),
            rotary,
            attention,
        )

    def _check(self, layer: LayerWeights) -> None:
        hidden, units = self.shape.hidden, -(-self.shape.intermediate // PANEL) * PANEL
        expected = {
            "qkv": (layer.qkv, layer.qkv.n, hidden),
            "output": (layer.output, hidden, layer.output.k),
            "gate_up": (layer.gate_up, 2 * units, hidden),
            "down": (layer.down, hidden, self.shape.intermediate),
        }
        for name, (weight, n, k) in expected.items():
            if (weight.n, weight.k) != (n, k):
                raise ValueError(f"{name} is [{weight.n}, {weight.k}], not [{n}, {k}]")
        norms = (layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm)
        if any(n is not None and (n.shape != (hidden,) or not _is_plain(n)) for n in norms):
            raise ValueError(f"norms must be contiguous fp32 [{hidden}]")
        others = (layer.q_norm, layer.k_norm, layer.sinks)
        if any(t is not None and not _is_plain(t) for t in others):
            raise ValueError("head norms and sinks must be contiguous fp32")

    def bind(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Sequence[Scales] | None = None
    ) -> None:
        """The caches of all layers, as paged_attention has them; every layer the same shape."""
        shape = attention_shape(self.shape.heads, keys[0], values[0])
        width = shape.heads * shape.k_dim + shape.kv_heads * (shape.k_dim + shape.v_dim)
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            if k.shape != keys[0].shape or v.shape != values[0].shape or k.dtype != keys[0].dtype:
                raise ValueError("the caches of all layers must have one shape and type")
            if not (_on_cpu(k) and _on_cpu(v)):
                raise ValueError("caches must be contiguous and on the CPU")
            if layer.qkv.n != width or layer.output.k != shape.heads * shape.v_dim:
                raise ValueError("the caches do not fit the projections")
        self._caches = (keys, values, scales)
        self._decoder.shape = shape
        by_layer: Sequence[Scales | None] = scales or [None for _ in keys]
        for struct, k, v, s in zip(self._layers, keys, values, by_layer, strict=True):
            struct.cache = kv_cache(k, v, s)

    def set_tables(self, tables: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Rotary tables (cosines, sines), each fp32 [positions, dims / 2]."""
        for cosines, sines in tables:
            if cosines.shape != sines.shape or not (_is_plain(cosines) and _is_plain(sines)):
                raise ValueError("cosines and sines must be contiguous fp32 tables of one shape")
        self._tables = tuple(tables)
        for struct, layer in zip(self._layers, self.layers, strict=True):
            if layer.rotary_table is not None:
                cosines, sines = tables[layer.rotary_table]
                struct.rotary.cosines, struct.rotary.sines = cosines.data_ptr(), sines.data_ptr()
                struct.rotary.dims = 2 * cosines.shape[1]

    @property
    def table_positions(self) -> int:
        """Positions that the tables cover."""
        return min((len(cosines) for cosines, _ in self._tables), default=2**31)

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        sequences: PackedSequences,
        rows: Tensor,
    ) -> Tensor:
        """Writes the KV of packed tokens (all int64 [T]); logits fp32 [len(rows), vocabulary] of some.

        Raises ValueError for ids outside the vocabulary. The caller guarantees the rest: positions in the
        tables, slots in the caches, rows among the tokens.
        """
        tokens = token_ids.shape[0]
        for name, t in (("token_ids", token_ids), ("positions", positions), ("slots", slots), ("rows", rows)):
            if t.dtype != torch.int64 or not t.is_contiguous() or (name != "rows" and t.shape != (tokens,)):
                raise ValueError(f"{name} must be contiguous int64 [{tokens}]")
        logits = torch.empty(rows.shape[0], self.head.n)
        step = structs.Step(
            tokens,
            rows.shape[0],
            token_ids.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            sequences.struct,
            rows.data_ptr(),
            logits.data_ptr(),
            None if self.times is None else self.times.address,
        )
        if self.library.hr_decoder_step(ctypes.byref(self._decoder), ctypes.byref(step)):
            raise ValueError(f"token ids must lie in 0..{self.embedding.n - 1}")
        return logits


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and _on_cpu(tensor)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


__all__ = [
    "PARTS",
    "CompiledDecoder",
    "DecoderShape",
    "LayerWeights",
    "StepTimes",
    "gate_up_rows",
    "reference",
]

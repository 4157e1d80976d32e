"""The decoder step in plain torch, from the same parts: what the compiled step must give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..gated_activation.reference import ACTIVATIONS
from ..matmul import PackedWeight, unpack
from ..matmul_int8.reference import quantise_activations
from ..paged_attention import reference as attention
from ..rms_norm.reference import rms_norm
from ..rotary_kv.reference import rotate

if TYPE_CHECKING:
    from . import CompiledDecoder, LayerWeights


def logits(
    decoder: CompiledDecoder, tables: Mapping[int, tuple[Tensor, Tensor]], token_ids: Tensor, kv_heads: int
) -> Tensor:
    """Logits [T, vocabulary] of one whole sequence token_ids [T], computed without any cache, in fp64."""
    shape = decoder.shape
    x = unpack(decoder.embedding).double()[token_ids] * shape.embedding_scale
    for layer in decoder.layers:
        h = rms_norm(x, layer.attention_norm.double(), shape.epsilon)
        h = _attend(decoder, layer, tables, h, kv_heads)
        x = x + _after(h, layer.attention_post_norm, shape.epsilon) * shape.residual_scale
        h = _feed_forward(decoder, layer, rms_norm(x, layer.mlp_norm.double(), shape.epsilon))
        x = x + _after(h, layer.mlp_post_norm, shape.epsilon) * shape.residual_scale
    x = rms_norm(x, decoder.final_norm.double(), shape.epsilon)
    out = _product(decoder.head, x) * shape.logit_scale
    return torch.tanh(out / shape.logit_softcap) * shape.logit_softcap if shape.logit_softcap else out


def _after(h: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return h if weight is None else rms_norm(h, weight.double(), epsilon)


def _attend(
    decoder: CompiledDecoder,
    layer: LayerWeights,
    tables: Mapping[int, tuple[Tensor, Tensor]],
    h: Tensor,
    kv_heads: int,
) -> Tensor:
    heads = decoder.shape.heads
    v_dim = layer.output.k // heads
    k_dim = (layer.qkv.n - kv_heads * v_dim) // (heads + kv_heads)
    qkv = _product(layer.qkv, h)
    q, k, v = qkv.split([heads * k_dim, kv_heads * k_dim, kv_heads * v_dim], 1)
    q, k, v = (t.unflatten(1, (-1, dim)) for t, dim in ((q, k_dim), (k, k_dim), (v, v_dim)))
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm.double(), layer.head_norm_epsilon)
        k = rms_norm(k, layer.k_norm.double(), layer.head_norm_epsilon)
    if layer.rotary_table is not None:
        cosines, sines = (t[: len(h)].double() for t in tables[layer.rotary_table])
        q, k = (rotate(t, cosines, sines, interleaved=layer.rotary_interleaved) for t in (q, k))
    sinks = None if layer.sinks is None else layer.sinks.double()
    out = attention.attend(
        q, k, v, 0, scale=layer.scale, window=layer.window, softcap=layer.softcap, sinks=sinks
    )
    return _product(layer.output, out.flatten(1))


def _feed_forward(decoder: CompiledDecoder, layer: LayerWeights, h: Tensor) -> Tensor:
    width = decoder.shape.intermediate
    both = _product(layer.gate_up, h)
    panels = both.unflatten(1, (-1, 2, 32))
    gate, up = (panels[:, :, i].flatten(1)[:, :width] for i in (0, 1))
    return _product(layer.down, ACTIVATIONS[decoder.shape.activation](gate) * up)


def _product(weight: PackedWeight, x: Tensor) -> Tensor:
    """x [rows, k] times a packed weight, its activations in bytes where it wants them; [rows, n] in fp64."""
    if weight.int8_activations:
        q, scales = quantise_activations(x)
        x = (q * scales).flatten(1)
    out = x @ unpack(weight).double().T
    return out if weight.bias is None else out + weight.bias

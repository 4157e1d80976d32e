"""A decoder of the Llama family as one compiled call a step, made from a transformers model found to be one.

It stands in for PackedModel where the compiled kernels run; `HEADRACE_KERNELS=torch` keeps the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from headrace_kernels.decoder_step import CompiledDecoder, DecoderShape, LayerWeights, gate_up_rows
from headrace_kernels.dispatch import backend
from headrace_kernels.paged_attention import MAX_GROUP
from worker.model.compiled import CompiledModel, Tables
from worker.model.kv import LayerShape
from worker.model.packed import PackedModel
from worker.model.selftest import Reference, passes, tolerance
from worker.model.stored import Forms, WeightSource, stack
from worker.model.structure import DecoderParts, LayerParts, NotFusable, Rotation, find_structure, half_tables

log = structlog.get_logger()
EXACT = Forms()


def compile_model(packed: PackedModel, *, gguf: Path | None = None, forms: Forms = EXACT) -> CompiledModel:
    """Raises NotFusable for models that the compiled step cannot compute."""
    model, layers = packed.model, packed.layers
    _check_shapes(layers)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    parts = find_structure(packed, embedding.weight.shape[0])
    rotations = _distinct_rotations(parts)

    def tables(positions: int) -> Tables:
        wanted = torch.arange(positions)[None]
        return [half_tables(*r.source(wanted), r.interleaved) for r in rotations]

    return CompiledModel(
        _compile(parts, layers[0], WeightSource(model, gguf, forms), rotations), layers, tables
    )


def drop_weights(model: nn.Module) -> None:
    """Free the model's own weights, which have been packed; shapes and dtypes stay."""
    for parameter in model.parameters():
        parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _check_shapes(layers: tuple[LayerShape, ...]) -> None:
    if len(set(layers)) != 1:
        raise NotFusable("its layers have heads of different sizes")


def _distinct_rotations(parts: DecoderParts) -> list[Rotation]:
    found = {(r.key, r.interleaved): r for layer in parts.layers if (r := layer.rotation) is not None}
    return list(found.values())


def _compile(
    parts: DecoderParts, shape: LayerShape, source: WeightSource, rotations: list[Rotation]
) -> CompiledDecoder:
    if parts.heads // shape.kv_heads > MAX_GROUP:
        raise NotFusable(f"{parts.heads} query heads share {shape.kv_heads} KV heads")
    first = parts.layers[0]
    table_of = {(r.key, r.interleaved): i for i, r in enumerate(rotations)}
    layers = [_layer(parts, layer, shape, source, table_of) for layer in parts.layers]
    embedding = source.matrix(parts.embedding).pack()
    bias = getattr(parts.head, "bias", None)
    tied = parts.head.weight is parts.embedding.weight and bias is None
    decoder_shape = DecoderShape(
        hidden=embedding.k,
        intermediate=layers[0].down.k,
        heads=parts.heads,
        activation=parts.activation,
        epsilon=first.attention_norm.epsilon,
        embedding_scale=parts.embedding_scale,
        residual_scale=parts.residual_scale,
        logit_scale=parts.logit_scale,
        logit_softcap=parts.logit_softcap,
    )
    head = embedding if tied else source.matrix(parts.head).pack(bias)
    return CompiledDecoder(decoder_shape, layers, embedding, head, parts.final_norm.weight)


def _layer(
    parts: DecoderParts,
    layer: LayerParts,
    shape: LayerShape,
    source: WeightSource,
    table_of: dict[tuple[int, bool], int],
) -> LayerWeights:
    epsilons = {n.epsilon for n in (layer.attention_norm, layer.mlp_norm, parts.final_norm)}
    if len(epsilons) != 1:
        raise NotFusable("its norms have different epsilons")
    heads = (parts.heads, shape.kv_heads, None) if len(layer.qkv) == 3 else (None,)
    qkv = [source.matrix(module, h) for module, h in zip(layer.qkv, heads, strict=True)]
    gate_up = stack([source.matrix(module) for module in layer.gate_up])
    rows = gate_up_rows(gate_up.rows // 2)
    head_norm = layer.q_norm or layer.k_norm
    rotation, call = layer.rotation, layer.call
    return LayerWeights(
        qkv=stack(qkv).pack(_bias(layer.qkv)),
        output=source.matrix(layer.output).pack(_bias([layer.output])),
        gate_up=gate_up.pack(_padded(_bias(layer.gate_up), rows), rows),
        down=source.matrix(layer.down).pack(_bias([layer.down])),
        attention_norm=layer.attention_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        attention_post_norm=None if layer.attention_post_norm is None else layer.attention_post_norm.weight,
        mlp_post_norm=None if layer.mlp_post_norm is None else layer.mlp_post_norm.weight,
        q_norm=None if layer.q_norm is None else layer.q_norm.weight,
        k_norm=None if layer.k_norm is None else layer.k_norm.weight,
        rotary_table=None if rotation is None else table_of[rotation.key, rotation.interleaved],
        rotary_interleaved=rotation is not None and rotation.interleaved,
        head_norm_epsilon=1e-6 if head_norm is None else head_norm.epsilon,
        scale=call.scale,
        softcap=call.softcap or 0.0,
        window=call.window or 0,
        sinks=None if call.sinks is None else call.sinks.detach().float().contiguous(),
    )


def _bias(modules: Sequence[Any]) -> Tensor | None:
    """The biases of linear layers, one after another; zeros for a layer without, None if all are."""
    biases = [module.bias for module in modules]
    if all(b is None for b in biases):
        return None
    parts = [
        torch.zeros(m.weight.shape[0]) if b is None else b.detach().float()
        for m, b in zip(modules, biases, strict=True)
    ]
    return torch.cat(parts)


def _padded(bias: Tensor | None, rows: list[int]) -> Tensor | None:
    """Row -1 has no bias."""
    return None if bias is None else torch.cat([bias, torch.zeros(1)])[rows]


def try_fused(
    packed: PackedModel,
    reference: Reference,
    *,
    gguf: Path | None,
    threads: int,
    forms: Forms = EXACT,
    kv_dtype: torch.dtype = torch.float32,
) -> CompiledModel | None:
    """The compiled form, if the kernels run here and it gives transformers' logits and equal bits in a crowd.

    None otherwise, with the reason in the log; the model is then as it was.
    """
    if backend().name != "cpu":
        return None
    try:
        fused = compile_model(packed, gguf=gguf, forms=forms)
    except NotFusable as problem:
        log.info("not_fused", reason=str(problem))
        return None
    allowed = tolerance(torch.float32, kv_dtype, lossy=not forms.lossless)
    if not passes(fused, reference, kv_dtype, torch.device("cpu"), allowed=allowed, threads=threads):
        return None
    drop_weights(packed.model)
    return fused

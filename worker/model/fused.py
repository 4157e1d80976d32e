"""A decoder of the Llama family as one compiled call a step, made from a transformers model found to be one.

It stands in for PackedModel where the compiled kernels run; `HEADRACE_KERNELS=torch` keeps the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from headrace_kernels.decoder_step import CompiledDecoder, DecoderShape, LayerWeights, gate_up_rows
from headrace_kernels.dispatch import backend
from headrace_kernels.paged_attention import MAX_GROUP, pack_sequences
from worker.model.inputs import StepInputs
from worker.model.kv import KVCache, LayerShape
from worker.model.packed import PackedModel
from worker.model.selftest import (
    TOLERANCE,
    Reference,
    bits_agree,
    crowded_logits,
    disagreement,
    self_test_cache,
)
from worker.model.stored import Forms, WeightSource, stack
from worker.model.structure import DecoderParts, LayerParts, NotFusable, Rotation, find_structure, half_tables

log = structlog.get_logger()
TABLE_STEP = 1024  # positions by which the rotary tables grow
EXACT = Forms()
LOSSY_TOLERANCE = 0.3  # of the largest logit: tells a coarse model from a wrong one


class FusedModel:
    """Same interface as PackedModel. Raises NotFusable for models that the compiled step cannot compute."""

    way = "fused"

    def __init__(self, packed: PackedModel, *, gguf: Path | None = None, forms: Forms = EXACT) -> None:
        self.model = packed.model
        self.layers = packed.layers
        _check_shapes(self.layers)
        embedding: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        parts = find_structure(packed, embedding.weight.shape[0])
        self._rotations = _distinct_rotations(parts)
        self.decoder = _compile(parts, self.layers[0], WeightSource(self.model, gguf, forms), self._rotations)
        self._cache: KVCache | None = None
        self._positions = 0
        self._grow_tables(1)

    def logits(self, inputs: StepInputs, kv: KVCache, rows: Tensor) -> Tensor:
        """Write this step's keys and values; the logits [R, vocab] fp32 of the packed tokens `rows` [R]."""
        if kv is not self._cache:
            self._bind(kv)
        self._grow_tables(int(inputs.kv_lens.max()))
        sequences = pack_sequences(inputs.cu_seqlens, inputs.starts, inputs.block_tables, inputs.block_size)
        self.decoder.library.hr_set_threads(torch.get_num_threads())
        return self.decoder.step(
            inputs.token_ids[0], inputs.positions[0], inputs.slots, sequences, rows.contiguous()
        )

    def drop_weights(self) -> None:
        """Free the model's own weights, which have been packed; shapes and dtypes stay."""
        for parameter in self.model.parameters():
            parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)

    def _bind(self, kv: KVCache) -> None:
        """The same memory, block for block; inside a block, the order that the attention kernel reads."""
        keys, values = [], []
        for layer, k, v in zip(kv.layers, kv.k, kv.v, strict=True):
            blocks, block_size = k.shape[:2]
            keys.append(k.view(blocks, layer.kv_heads, layer.k_dim, block_size))
            values.append(v.view(blocks, layer.kv_heads, block_size, layer.v_dim))
        self.decoder.bind(keys, values)
        self._cache = kv

    @torch.inference_mode()
    def _grow_tables(self, positions: int) -> None:
        if positions <= self._positions:
            return
        self._positions = -(-positions // TABLE_STEP) * TABLE_STEP
        wanted = torch.arange(self._positions)[None]
        self.decoder.set_tables([half_tables(*r.source(wanted), r.interleaved) for r in self._rotations])


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
    packed: PackedModel, reference: Reference, *, gguf: Path | None, threads: int, forms: Forms = EXACT
) -> FusedModel | None:
    """The compiled form, if the kernels run here and it gives transformers' logits and equal bits in a crowd.

    None otherwise, with the reason in the log; the model is then as it was.
    """
    if backend().name != "cpu":
        return None
    try:
        fused = FusedModel(packed, gguf=gguf, forms=forms)
    except NotFusable as problem:
        log.info("not_fused", reason=str(problem))
        return None
    kv = self_test_cache(fused, torch.float32, torch.device("cpu"))
    crowd = crowded_logits(fused, reference.prompts, kv)
    error = disagreement(crowd, reference)
    tolerance = TOLERANCE[torch.float32] if forms.lossless else LOSSY_TOLERANCE
    if error <= tolerance and bits_agree(fused, reference.prompts, kv, crowd, threads):
        fused.drop_weights()
        return fused
    log.warning("not_fused", reason="it differs from transformers", error=error)
    return None

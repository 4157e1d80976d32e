"""A decoder of the Llama family through Triton's kernels, made from a transformers model found to be one.

Nothing in a step depends on the values of its inputs but the number of sequences and tokens, so a step can
be captured in a CUDA graph. Every row's bits depend on its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from headrace_kernels.gated_activation.triton import gated_activation
from headrace_kernels.matmul.triton import linear
from headrace_kernels.paged_attention.triton import DeviceSequences, pack_sequences, paged_attention
from headrace_kernels.rms_norm.triton import rms_norm
from headrace_kernels.rotary_kv.triton import Rotary, rotary_kv_write
from worker.model.inputs import StepInputs
from worker.model.kv import KVCache, LayerShape
from worker.model.packed import PackedModel
from worker.model.selftest import Reference, passes, tolerance
from worker.model.structure import (
    DecoderParts,
    LayerParts,
    Norm,
    NotFusable,
    Rotation,
    find_structure,
    half_tables,
)
from worker.model.transfer import send
from worker.model.triton_attention import kernel_caches

log = structlog.get_logger()
TABLE_STEP = 1024  # positions by which the rotary tables grow


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A product's weight [n, k] and bias [n] on the device."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    parts: LayerParts
    qkv: Weights
    output: Weights
    gate_up: Weights
    down: Weights


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStep:
    """A step's packed tokens on the device: ids, positions, slots [T]; rows [R] whose logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    sequences: DeviceSequences


class TritonModel:
    """Same interface as PackedModel. Its weights are copies in `dtype` on `device`."""

    way = "triton"
    takes_fed = True

    def __init__(
        self, parts: DecoderParts, layers: Sequence[LayerShape], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layers = tuple(layers)
        self.groups = tuple(sorted({parts.heads // layer.kv_heads for layer in layers}))
        self.parts, self.device, self.dtype = parts, device, dtype
        self._copies: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self.embedding = self._on_device(parts.embedding.weight)  # type: ignore[arg-type]
        self.head = self._weights([parts.head])
        self._layers = [
            Layer(
                layer, *(self._weights(m) for m in (layer.qkv, [layer.output], layer.gate_up, [layer.down]))
            )
            for layer in parts.layers
        ]
        self._tables: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self._positions = 0
        self._copies.clear()

    def logits(self, inputs: StepInputs, kv: KVCache, rows: Tensor) -> Tensor:
        """Write this step's keys and values; the logits [R, vocab] fp32 of the packed tokens `rows` [R].

        `inputs` and `rows` may be on the host.
        """
        self.grow_tables(int(inputs.kv_lens.max()))
        sequences = self._sequences(inputs)
        packed = (inputs.token_ids[0], inputs.positions[0], inputs.slots, rows)
        ids, positions, slots, wanted = (send(t, self.device) for t in packed)
        if inputs.fed is not None:
            inputs.fed.into(ids)
        return self.run(DeviceStep(ids, positions, slots, wanted, sequences), kv)

    def run(self, step: DeviceStep, kv: KVCache) -> Tensor:
        """All of a step on the device, without a look at any value."""
        parts = self.parts
        residual = self.embedding.index_select(0, step.token_ids) * parts.embedding_scale
        h = self._norm(residual, parts.layers[0].attention_norm)
        after = [layer.attention_norm for layer in parts.layers[1:]] + [parts.final_norm]
        for number, (layer, next_norm) in enumerate(zip(self._layers, after, strict=True)):
            h = self._attend(number, layer, h, step, kv)
            h = self._added(h, layer.parts.attention_post_norm, residual, layer.parts.mlp_norm)
            h = layer.down(gated_activation(layer.gate_up(h), parts.activation))
            h = self._added(h, layer.parts.mlp_post_norm, residual, next_norm)
        out = linear(h.index_select(0, step.rows), self.head.weight, self.head.bias, dtype=torch.float32)
        out = out * parts.logit_scale if parts.logit_scale != 1.0 else out
        return torch.tanh(out / parts.logit_softcap) * parts.logit_softcap if parts.logit_softcap else out

    def _sequences(self, inputs: StepInputs) -> DeviceSequences:
        laid_out = pack_sequences(
            inputs.cu_seqlens, inputs.starts, inputs.block_tables, inputs.block_size, groups=self.groups
        )
        cu, starts, tables = (send(t, self.device) for t in (laid_out.cu, laid_out.starts, laid_out.tables))
        programs = {
            g: (send(numbers, self.device), send(firsts, self.device))
            for g, (numbers, firsts) in laid_out.programs.items()
        }
        return DeviceSequences(cu, starts, tables, programs, laid_out.longest)

    def _attend(self, number: int, layer: Layer, h: Tensor, step: DeviceStep, kv: KVCache) -> Tensor:
        keys, values = kernel_caches(kv, number)
        how, call = self._rotary(layer.parts), layer.parts.call
        scales, qkv = kv.scales(number), layer.qkv(h)
        query = rotary_kv_write(
            qkv, how, step.positions, step.slots, keys, values, heads=self.parts.heads, scales=scales
        )
        out = paged_attention(
            query,
            keys,
            values,
            step.sequences,
            scale=call.scale,
            window=call.window or 0,
            softcap=call.softcap or 0.0,
            sinks=None if call.sinks is None else self._on_device(call.sinks),
            scales=scales,
        )
        return layer.output(out.flatten(1))

    def _added(self, h: Tensor, post: Norm | None, residual: Tensor, norm: Norm) -> Tensor:
        """The norm of the residual with a layer's result added."""
        if post is not None:
            h = self._norm(h, post)
        if self.parts.residual_scale != 1.0:
            h = h * self.parts.residual_scale
        return rms_norm(h, self._norm_weight(norm), norm.epsilon, residual=residual)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, self._norm_weight(norm), norm.epsilon)

    def _norm_weight(self, norm: Norm) -> Tensor:
        if id(norm) not in self._norms:
            self._norms[id(norm)] = norm.weight.to(self.device)
        return self._norms[id(norm)]

    def _rotary(self, layer: LayerParts) -> Rotary:
        rotation, norm = layer.rotation, layer.q_norm or layer.k_norm
        cosines, sines = (None, None) if rotation is None else self._tables[_key(rotation)]
        return Rotary(
            cosines,
            sines,
            rotation is not None and rotation.interleaved,
            None if layer.q_norm is None else self._norm_weight(layer.q_norm),
            None if layer.k_norm is None else self._norm_weight(layer.k_norm),
            1e-6 if norm is None else norm.epsilon,
        )

    @torch.inference_mode()
    def grow_tables(self, positions: int) -> None:
        """The rotary tables hold at least `positions` from then on; a captured graph needs all it may see."""
        if positions <= self._positions:
            return
        self._positions = -(-positions // TABLE_STEP) * TABLE_STEP
        wanted = torch.arange(self._positions)[None]
        for layer in self.parts.layers:
            if layer.rotation is not None:
                tables = half_tables(*layer.rotation.source(wanted), layer.rotation.interleaved)
                self._tables[_key(layer.rotation)] = tables[0].to(self.device), tables[1].to(self.device)

    def _weights(self, modules: Sequence[nn.Module]) -> Weights:
        weight = self._on_device(*(m.weight for m in modules))  # type: ignore[arg-type]
        biases: list[Any] = [getattr(m, "bias", None) for m in modules]
        if all(b is None for b in biases):
            return Weights(weight, None)
        sizes = [int(m.weight.shape[0]) for m in modules]  # type: ignore[index]
        parts = [torch.zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)]
        return Weights(weight, torch.cat([p.detach().float() for p in parts]).to(self.device, self.dtype))

    def _on_device(self, *tensors: Tensor) -> Tensor:
        """One after another; a tensor that comes again alone (a head tied to the embedding) is one copy."""
        key = id(tensors[0])
        if len(tensors) > 1 or key not in self._copies:
            self._copies[key] = torch.cat([t.detach().to(self.device, self.dtype) for t in tensors])
        return self._copies[key]


def _key(rotation: Rotation) -> tuple[int, bool]:
    return rotation.key, rotation.interleaved


def try_triton(
    model: Any,
    reference: Reference,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype = torch.float32,
) -> TritonModel | None:
    """The model through Triton's kernels, if it gives transformers' logits and equal bits in a crowd.

    None otherwise, with the reason in the log; the model is then as it was. Its structure is found on the
    CPU in fp32, where rounding explains nothing away.
    """
    before = {name: (t.device, t.dtype) for name, t in _tensors(model)}
    try:
        _move(model, {name: (torch.device("cpu"), torch.float32) for name in before})
        packed = PackedModel(model, torch.device("cpu"))
        parts = find_structure(packed, model.get_input_embeddings().weight.shape[0])
        found = TritonModel(parts, packed.layers, device, dtype)
    except NotFusable as problem:
        log.info("not_fused", reason=str(problem))
        _move(model, before)
        return None
    if passes(found, reference, kv_dtype, device, allowed=tolerance(dtype, kv_dtype), threads=1):
        for parameter in model.parameters():
            parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        return found
    _move(model, before)
    return None


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if b.is_floating_point())]


def _move(model: nn.Module, where: dict[str, tuple[torch.device, torch.dtype]]) -> None:
    for name, tensor in _tensors(model):
        tensor.data = tensor.data.to(*where[name])

"""The file of a prepared model: all that a start needs, as plain bytes.

Layout: magic, length of the header, header (JSON), the tensors at multiples of 64 bytes, rotary tables last.
Tables are mapped, for a context is seldom used to its end; all else is read at once, onto huge pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace_kernels import matmul
from headrace_kernels.decoder_step import CompiledDecoder, DecoderShape, LayerWeights
from headrace_kernels.dispatch import backend
from worker.model.compiled import CompiledModel, Tables
from worker.model.kv import LayerShape
from worker.model.selftest import Reference

MAGIC = b"headrace prepared model 1\n"
ALIGNMENT = 64
_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}
_SUM_BITS = 2**63 - 1  # JSON readers know numbers up to here


class ModelFacts(msgspec.Struct, frozen=True):
    """What a checkpoint says of its model. `weights`: a digest. `id_limit`: ids below it have embeddings."""

    weights: str
    vocab_size: int
    id_limit: int
    tokenizer_vocab_size: int
    eos_ids: frozenset[int]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Prepared:
    model: CompiledModel
    facts: ModelFacts
    reference: Reference


class _Piece(msgspec.Struct, frozen=True):
    """A tensor's place in the file, counted from the first tensor."""

    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _DTYPES[self.dtype].itemsize


class _Weight(msgspec.Struct, frozen=True):
    n: int
    k: int
    storage: str
    int8_activations: bool
    panels: int  # number of a piece
    bias: int | None


class _Layer(msgspec.Struct, frozen=True):
    weights: dict[str, _Weight]
    tensors: dict[str, int]
    others: dict[str, Any]


class _Header(msgspec.Struct, frozen=True):
    facts: ModelFacts
    decoder: dict[str, Any]
    layers: tuple[_Layer, ...]
    layer_shapes: tuple[tuple[int, int, int], ...]
    embedding: _Weight
    head: _Weight | None  # None: the embedding
    final_norm: int
    tables: tuple[tuple[int, int], ...]
    prompts: tuple[list[int], ...]
    logits: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    resident_bytes: int  # of tensors that are read at once; the tables behind them are mapped
    checksum: int


def write_prepared(
    file: BinaryIO, model: CompiledModel, facts: ModelFacts, reference: Reference, tables: Tables
) -> None:
    """`tables` of all positions. Raises OSError."""
    _Writer(file).write(model, facts, reference, tables)


def read_prepared(place: Path) -> Prepared:
    """Raises OSError, or ValueError and its like where the file is damaged or of another kind."""
    with place.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("another format")
        size = int.from_bytes(file.read(8), "little")
        header = msgspec.json.decode(file.read(size), type=_Header)
        return _Reader(file, _aligned(file.tell()), header).read()


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.tensors: list[Tensor] = []
        self.pieces: list[_Piece] = []
        self.end = 0

    def write(self, model: CompiledModel, facts: ModelFacts, reference: Reference, tables: Tables) -> None:
        decoder = model.decoder
        tied = decoder.head is decoder.embedding
        described: dict[str, Any] = dict(
            facts=facts,
            decoder={f.name: getattr(decoder.shape, f.name) for f in fields(DecoderShape)},
            layers=tuple(self._layer(layer) for layer in decoder.layers),
            layer_shapes=tuple((s.kv_heads, s.k_dim, s.v_dim) for s in model.layers),
            embedding=self._weight(decoder.embedding),
            head=None if tied else self._weight(decoder.head),
            final_norm=self._add(decoder.final_norm),
            prompts=reference.prompts,
            logits=tuple(self._add(row) for row in reference.logits),
        )
        resident_bytes = self.end
        checksum = sum(_word_sum(t) for t in self.tensors) & _SUM_BITS
        numbers = tuple((self._add(cosines), self._add(sines)) for cosines, sines in tables)
        header = _Header(
            **described,
            tables=numbers,
            pieces=tuple(self.pieces),
            resident_bytes=resident_bytes,
            checksum=checksum,
        )
        text = msgspec.json.encode(header)
        self.file.write(MAGIC + len(text).to_bytes(8, "little") + text)
        start = _aligned(self.file.tell())
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            self.file.seek(start + piece.at)
            self.file.write(_bytes_of(tensor))
        self.file.truncate(start + _aligned(self.end))

    def _layer(self, layer: LayerWeights) -> _Layer:
        weights, tensors, others = {}, {}, {}
        for field in fields(LayerWeights):
            value = getattr(layer, field.name)
            if isinstance(value, matmul.PackedWeight):
                weights[field.name] = self._weight(value)
            elif isinstance(value, Tensor):
                tensors[field.name] = self._add(value)
            else:
                others[field.name] = value
        return _Layer(weights, tensors, others)

    def _weight(self, w: matmul.PackedWeight) -> _Weight:
        bias = None if w.bias is None else self._add(w.bias)
        return _Weight(w.n, w.k, w.storage, bool(w.int8_activations), self._add(w.panels), bias)

    def _add(self, tensor: Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self.pieces.append(_Piece(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.end))
        self.tensors.append(tensor)
        self.end = _aligned(self.end + self.pieces[-1].num_bytes)
        return len(self.pieces) - 1


class _Reader:
    def __init__(self, file: BinaryIO, start: int, header: _Header) -> None:
        self.file, self.start, self.header = file, start, header
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.tables: list[tuple[Tensor, Tensor]] = []

    def read(self) -> Prepared:
        header = self.header
        end = max(_aligned(p.at + p.num_bytes) for p in header.pieces)
        if os.fstat(self.file.fileno()).st_size != self.start + end:
            raise ValueError("it is not whole")
        self.memory = matmul.aligned_bytes(backend().library, header.resident_bytes)
        self.file.seek(self.start)
        into = memoryview(self.memory.numpy())  # type: ignore[arg-type]
        while count := self.file.readinto(into):  # type: ignore[attr-defined]  # at most 2 GiB at a time
            into = into[count:]
        if _word_sum(self.memory) & _SUM_BITS != header.checksum:
            raise ValueError("its content has changed")
        mapped = torch.from_numpy(np.memmap(self.file, np.uint8, "c", self.start))
        self.tables = [(self._in(mapped, c), self._in(mapped, s)) for c, s in header.tables]
        embedding = self._weight(header.embedding)
        decoder = CompiledDecoder(
            DecoderShape(**header.decoder),
            [self._layer(layer) for layer in header.layers],
            embedding,
            embedding if header.head is None else self._weight(header.head),
            self._tensor(header.final_norm),
        )
        shapes = tuple(LayerShape(*shape) for shape in header.layer_shapes)
        reference = Reference(header.prompts, tuple(self._tensor(number) for number in header.logits))
        return Prepared(CompiledModel(decoder, shapes, _first_rows(self.tables)), header.facts, reference)

    def _layer(self, layer: _Layer) -> LayerWeights:
        parts: dict[str, Any] = {name: self._weight(w) for name, w in layer.weights.items()}
        parts |= {name: self._tensor(number) for name, number in layer.tensors.items()}
        return LayerWeights(**parts, **layer.others)

    def _weight(self, w: _Weight) -> matmul.PackedWeight:
        bias = None if w.bias is None else self._tensor(w.bias)
        return matmul.from_panels(
            self._tensor(w.panels), w.n, w.k, w.storage, bias, int8_activations=w.int8_activations
        )

    def _tensor(self, number: int) -> Tensor:
        return self._in(self.memory, number)

    def _in(self, memory: Tensor, number: int) -> Tensor:
        piece = self.header.pieces[number]
        return memory[piece.at : piece.at + piece.num_bytes].view(_DTYPES[piece.dtype]).view(piece.shape)


def _first_rows(tables: Sequence[tuple[Tensor, Tensor]]) -> Callable[[int], Tables]:
    def some(positions: int) -> Tables:
        return [(cosines[:positions], sines[:positions]) for cosines, sines in tables]

    return some


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _word_sum(tensor: Tensor) -> int:
    """A sum over all bytes, as words of eight with zeros behind them: any flipped bit changes it."""
    raw = np.frombuffer(_bytes_of(tensor), np.uint8)
    words = raw[: len(raw) // 8 * 8].view(np.uint64)
    return int(np.add.reduce(words)) + int.from_bytes(raw[len(words) * 8 :].tobytes(), "little")

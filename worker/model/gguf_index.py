"""What tensors a GGUF file holds and where, without reading its vocabulary.

The `gguf` package turns every token and merge into arrays, which takes seconds; strings are stepped over
here. Format: the GGUF specification of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_STRING, _ARRAY = 8, 9
_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`data`: the stored bytes [bytes], a view of the mapped file. `tensor_type`: of gguf, as Q4_1."""

    name: str
    tensor_type: Any
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufIndex:
    architecture: str
    tensors: tuple[GgufTensor, ...]


def read_index(path: Path) -> GgufIndex:
    """Raises ValueError where the file is not GGUF or ends too early."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read(mapped)
    except (struct.error, IndexError, UnicodeDecodeError, KeyError) as problem:
        raise ValueError(f"{path.name}: not a whole GGUF file") from problem


def _read(mapped: mmap.mmap) -> GgufIndex:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if mapped[:4] != b"GGUF":
        raise ValueError("not a GGUF file")
    _, num_tensors, num_fields = struct.unpack_from("<IQQ", mapped, 4)
    at, fields = 24, {}
    for _ in range(num_fields):
        key, at = _string(mapped, at)
        (kind,) = struct.unpack_from("<I", mapped, at)
        fields[key], at = _value(mapped, at + 4, kind)
    infos = []
    for _ in range(num_tensors):
        name, at = _string(mapped, at)
        (num_dims,) = struct.unpack_from("<I", mapped, at)
        *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", mapped, at + 4)
        at += 4 + 8 * num_dims + 12
        infos.append((name, dims, GGMLQuantizationType(kind), offset))
    alignment = fields.get("general.alignment") or _ALIGNMENT
    start = -(-at // alignment) * alignment
    data = np.frombuffer(mapped, np.uint8)
    tensors = []
    for name, dims, tensor_type, offset in infos:
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        size = int(np.prod(dims, dtype=np.int64)) // block * block_bytes
        if start + offset + size > len(data):
            raise IndexError(name)
        tensors.append(GgufTensor(name, tensor_type, data[start + offset : start + offset + size]))
    return GgufIndex(str(fields.get("general.architecture") or ""), tuple(tensors))


def _string(mapped: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", mapped, at)
    end = at + 8 + length
    if end > len(mapped):
        raise IndexError(at)
    return mapped[at + 8 : end].decode(), end


def _value(mapped: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """A scalar or string and where it ends; None for an array, which is stepped over."""
    if kind == _STRING:
        return _string(mapped, at)
    if kind != _ARRAY:
        return struct.unpack_from(_FORMATS[kind], mapped, at)[0], at + struct.calcsize(_FORMATS[kind])
    element, count = struct.unpack_from("<IQ", mapped, at)
    at += 12
    if element not in (_STRING, _ARRAY):
        return None, at + count * struct.calcsize(_FORMATS[element])
    length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        at = at + 8 + length(mapped, at)[0] if element == _STRING else _value(mapped, at, _ARRAY)[1]
    return None, at

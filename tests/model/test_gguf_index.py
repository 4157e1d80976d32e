"""The quick index of a GGUF file, against the gguf package's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from worker.model.gguf_index import read_index


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    path, rng = tmp_path / "some.gguf", np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(7)
    writer.add_token_list(["a", "é", "", "漢" * 9])
    writer.add_token_scores([0.0, 1.0, 2.0, 3.0])
    writer.add_array("odd", [True, False])
    writer.add_rope_freq_base(1e4)
    for name, kind in (("one", "Q8_0"), ("two", "Q4_1"), ("three", "F16")):
        values = rng.normal(size=(3, 64)).astype(np.float32)
        if kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            quantization = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_finds_what_the_package_finds(gguf: Path) -> None:
    from gguf import GGUFReader

    index, reader = read_index(gguf), GGUFReader(gguf)
    assert index.architecture == "llama"
    assert [(t.name, t.tensor_type) for t in index.tensors] == [
        (t.name, t.tensor_type) for t in reader.tensors
    ]
    for ours, theirs in zip(index.tensors, reader.tensors, strict=True):
        assert ours.data.tobytes() == np.ascontiguousarray(theirs.data).tobytes()


def test_a_file_cut_anywhere_is_an_error(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(1, len(whole) - 32, 7), len(whole) - 40]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError):
            read_index(cut)

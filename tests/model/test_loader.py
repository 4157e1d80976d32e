"""Loading: folders, GGUF files, what is found in them, and the one line an odd folder gets."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models import ModelError
from worker.model import inflate
from worker.model.fingerprint import hash_weights, make_fingerprint
from worker.model.inflate import inflated_folder
from worker.model.loader import LoadedModel, load
from worker.model.runner import ModelRunner
from worker.model.vocabulary import eos_token_ids, tokenizer_vocab_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random llama as Hugging Face keeps it, in bfloat16; its tokenizer is narrower than the logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=300,
        eos_token_id=[2, 3],
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    target = tmp_path / "tiny-llama"
    model.save_pretrained(target)
    vocab = {f"t{i}": i for i in range(96)}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 96, "content": "<end>"}]}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return target


def test_a_folder(folder: Path) -> None:
    loaded = load(folder, device="cpu")
    assert loaded.name == "tiny-llama"
    assert loaded.dtype == torch.float32
    assert loaded.exact
    assert (loaded.vocab_size, loaded.tokenizer_vocab_size) == (128, 97)
    assert loaded.eos_ids == {2, 3, 96}
    assert loaded.max_model_len == 300
    assert loaded.kv_bytes_per_token == 2 * 2 * (12 + 12) * 4
    assert loaded.path == folder


def test_the_fingerprint_names_the_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    first, again = load(folder, device="cpu").fingerprint, load(folder, device="cpu").fingerprint
    assert first == again
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name].view(torch.int16)[5, 7] ^= 1  # one bit
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder, device="cpu").fingerprint != first


def test_hash_sees_swapped_values() -> None:
    layer = torch.nn.Linear(4, 4)
    before = hash_weights(layer)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(0))
    assert hash_weights(layer) != before
    one = make_fingerprint(before, dtype="float32", device="cpu", kernels=("a",))
    assert one != make_fingerprint(before, dtype="float32", device="cpu", kernels=("b",))


def _drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))


def _encoder_decoder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))


@pytest.mark.parametrize(
    "spoil",
    [
        _drop_config,
        _drop_weights,
        _cut_weights,
        _drop_a_tensor,
        _break_config,
        _unknown_type,
        _encoder_decoder,
    ],
)
def test_an_odd_folder_is_refused_in_one_line(folder: Path, spoil: Any) -> None:
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        load(folder, device="cpu")
    text = str(refused.value)
    assert "\n" not in text
    assert "tiny-llama" in text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda"}, "CUDA"),
        ({"device": "cpu", "dtype": "bfloat16"}, "float32"),
        ({"device": "cpu", "dtype": "int3"}, "int3"),
    ],
)
def test_odd_options_are_refused(folder: Path, options: dict[str, str], word: str) -> None:
    if options["device"] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ModelError, match=word):
        load(folder, **options)  # type: ignore[arg-type]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load(tmp_path / "missing")


def test_a_damaged_gguf_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5) + b"\0" * 64)
    with pytest.raises(ModelError) as refused:
        load(path, cache_dir=tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "cache" / "inflated").iterdir())


def test_two_models_in_one_process_keep_apart(folder: Path) -> None:
    """Loading leaves transformers usable, and models do not see each other's steps."""
    from transformers import AutoModelForCausalLM

    first, second = load(folder, device="cpu"), load(folder, device="cpu")
    assert first.forward is not second.forward
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = plain.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert out.shape == (1, 7)


def test_vocabulary_files(tmp_path: Path) -> None:
    config = SimpleNamespace(eos_token_id=None)
    assert tokenizer_vocab_size(tmp_path, 50) == 50
    assert eos_token_ids(tmp_path, [config], 50) == frozenset()
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": [{"id": 9, "content": "e"}]}
        )
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "e"}}))
    assert tokenizer_vocab_size(tmp_path, 50) == 10
    assert tokenizer_vocab_size(tmp_path, 8) == 8
    assert eos_token_ids(tmp_path, [SimpleNamespace(eos_token_id=[-1, 3, 77])], 50) == {3, 9}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A tiny random llama with a byte-pair tokenizer in one GGUF file."""
    from gguf import GGUFWriter, TokenType

    path, rng = tmp_path / "tiny.gguf", np.random.default_rng(0)
    tokens = ["<end>", *(chr(c) for c in range(33, 97)), "AB"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(0)
    shapes = {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    for i in range(2):
        layer = {
            "attn_norm": (32,),
            "ffn_norm": (32,),
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
        }
        layer |= {"attn_output": (32, 32), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32) * 0.2 + (len(shape) == 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_with_and_without_a_cache(gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = load(gguf, device="cpu", cache_dir=cache)
    copy = first.path / "model.safetensors"
    made = copy.stat()
    second = load(gguf.parent, device="cpu", cache_dir=cache)  # the only GGUF file of its folder
    assert copy.stat().st_ino == made.st_ino
    without = load(gguf, device="cpu")
    assert without.path == gguf
    assert first.fingerprint == second.fingerprint == without.fingerprint
    assert (first.vocab_size, first.eos_ids, first.exact) == (66, {0}, True)
    assert (first.path / "tokenizer.json").exists()


def test_a_damaged_inflated_copy_is_made_again(gguf: Path, tmp_path: Path) -> None:
    folder = inflated_folder(gguf, tmp_path / "cache")
    whole = (folder / "model.safetensors").read_bytes()
    for spoil in (whole[:1000], b"", whole[:-4]):
        (folder / "model.safetensors").write_bytes(spoil)
        assert inflated_folder(gguf, tmp_path / "cache") == folder
        assert (folder / "model.safetensors").read_bytes() == whole
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_two_workers_that_start_at_once_inflate_it_both(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one still writes, the other has come, found nothing and finished: its copy is taken."""
    write, inodes = inflate._inflate, []

    def write_behind_another(source: Path, work: Path) -> None:
        write(source, work)
        monkeypatch.setattr(inflate, "_inflate", write)
        inodes.append((inflated_folder(gguf, tmp_path) / "model.safetensors").stat().st_ino)

    monkeypatch.setattr(inflate, "_inflate", write_behind_another)
    folder = inflated_folder(gguf, tmp_path)
    assert [(folder / "model.safetensors").stat().st_ino] == inodes
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.model
def test_the_demo_model(demo: LoadedModel) -> None:
    assert demo.eos_ids == {2}
    assert demo.vocab_size == demo.tokenizer_vocab_size == 49_152
    assert demo.max_model_len == 8192
    assert demo.kv_bytes_per_token == 46_080
    assert demo.exact


@pytest.mark.model
def test_greedy_ids_of_the_demo_model_are_those_of_transformers(
    kit: SimpleNamespace, demo: LoadedModel, demo_runner: ModelRunner
) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(demo.path, dtype=torch.float32)
    prompts = [[504, 2365, 282, 260, 905], list(range(1000, 1040))]
    some = kit.Driver(demo_runner).run([kit.Sequence(p) for p in prompts], 16, chunk=lambda: 11)
    for s in some:
        ids = torch.tensor([s.prompt])
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert s.output == out[0, len(s.prompt) :].tolist()

"""What is kept of a loaded model: the same bits at the next start, without transformers; nothing stale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.config import default_cache_dir
from headrace_kernels.dispatch import backend
from worker.model import prepared
from worker.model.loader import LoadedModel, load
from worker.model.runner import ModelRunner
from worker.model.stored import Forms

pytestmark = pytest.mark.skipif(backend().name != "cpu", reason="no compiled kernels")

SHAPE: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=300,
    pad_token_id=0,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With biases, and a head of its own."""
    return save_model(tmp_path / "model.v1", seed=0)


def save_model(folder: Path, seed: int) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def kept_files(cache: Path) -> list[Path]:
    return sorted((cache / "prepared").iterdir())


def tokens_of(kit: SimpleNamespace, loaded: LoadedModel) -> list[Any]:
    runner = ModelRunner(loaded, num_blocks=40, block_size=16)
    some = [kit.Sequence(p) for p in kit.make_prompts(5, 101, 60)]
    return [s.scored for s in kit.Driver(runner).run(some, 6, chunk=lambda: 9)]


def facts_of(loaded: LoadedModel) -> dict[str, Any]:
    return {name: getattr(loaded, name) for name in LoadedModel.__slots__ if name != "forward"}


@pytest.mark.parametrize("options", [{}, {"activations": "int8"}, {"weights": "q4", "kv_dtype": "fp16"}])
def test_the_second_start_gives_the_first_ones_bits(
    kit: SimpleNamespace, folder: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    first = load(folder, device="cpu", cache_dir=tmp_path / "cache", **options)  # type: ignore[arg-type]
    (made,) = kept_files(tmp_path / "cache")
    before = made.stat()
    second = load(folder, device="cpu", cache_dir=tmp_path / "cache", **options)  # type: ignore[arg-type]
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert facts_of(first) == facts_of(second)
    assert tokens_of(kit, first) == tokens_of(kit, second)


def test_keys_and_values_may_be_kept_otherwise_than_at_the_first_start(
    kit: SimpleNamespace, folder: Path, tmp_path: Path
) -> None:
    load(folder, device="cpu", cache_dir=tmp_path / "cache")
    from_cache = load(folder, device="cpu", cache_dir=tmp_path / "cache", kv_dtype="int8")
    afresh = load(folder, device="cpu", kv_dtype="int8")
    assert len(kept_files(tmp_path / "cache")) == 1
    assert facts_of(from_cache) == facts_of(afresh)
    assert tokens_of(kit, from_cache) == tokens_of(kit, afresh)


def test_other_weights_under_the_same_name_are_loaded_afresh(
    kit: SimpleNamespace, folder: Path, tmp_path: Path
) -> None:
    first = load(folder, device="cpu", cache_dir=tmp_path / "cache")
    (old,) = kept_files(tmp_path / "cache")
    save_model(folder, seed=1)
    second = load(folder, device="cpu", cache_dir=tmp_path / "cache")
    assert first.fingerprint != second.fingerprint
    assert len(kept_files(tmp_path / "cache")) == 2
    assert old in kept_files(tmp_path / "cache")
    assert tokens_of(kit, second) == tokens_of(kit, load(folder, device="cpu"))


@pytest.mark.parametrize("spoil", ["cut", "empty", "flipped", "header", "foreign"])
def test_a_damaged_file_is_made_again(kit: SimpleNamespace, folder: Path, tmp_path: Path, spoil: str) -> None:
    first = load(folder, device="cpu", cache_dir=tmp_path / "cache")
    (made,) = kept_files(tmp_path / "cache")
    whole = made.read_bytes()
    at = 300_000
    damaged = {
        "cut": whole[:-64],
        "empty": b"",
        "flipped": whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :],
        "header": whole.replace(b'"storage"', b'"sturage"', 1),
        "foreign": b"x" * 1000,
    }[spoil]
    assert damaged != whole
    made.write_bytes(damaged)
    assert prepared.read(made) is None
    second = load(folder, device="cpu", cache_dir=tmp_path / "cache")
    assert made.read_bytes() == whole
    assert tokens_of(kit, first) == tokens_of(kit, second)


def test_numbers_that_are_no_longer_transformers_are_not_served(folder: Path, tmp_path: Path) -> None:
    """The self-test is made at each start, against the logits that were kept."""
    load(folder, device="cpu", cache_dir=tmp_path / "cache")
    (made,) = kept_files(tmp_path / "cache")
    found = prepared.read(made)
    assert found is not None
    found.model.decoder.final_norm.mul_(1.5)
    prepared.keep(made, found.model, found.facts, found.reference)
    spoilt = made.read_bytes()
    load(folder, device="cpu", cache_dir=tmp_path / "cache")
    assert made.read_bytes() != spoilt


def test_what_an_earlier_program_made_goes(folder: Path, tmp_path: Path) -> None:
    load(folder, device="cpu", cache_dir=tmp_path / "cache")
    (made,) = kept_files(tmp_path / "cache")
    old = made.with_name(made.name.replace(made.stem.rpartition("-")[2], "0" * 12))
    other_form = made.with_name(made.name.replace("auto-fp32", "q8-fp32"))
    old.write_bytes(b"old")
    other_form.write_bytes(b"other")
    made.unlink()
    load(folder, device="cpu", cache_dir=tmp_path / "cache")
    assert kept_files(tmp_path / "cache") == sorted([made, other_form])


def test_the_place_tells_forms_and_checkpoints_apart(folder: Path, tmp_path: Path) -> None:
    forms = [Forms(), Forms("q8"), Forms(activations="int8")]
    places = {prepared.place(folder, tmp_path, f) for f in forms}
    (folder / "tokenizer.json").write_text("{}")
    places.add(prepared.place(folder, tmp_path, Forms()))
    assert len(places) == 4


def test_a_cache_that_cannot_be_written_costs_nothing(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "prepared").write_text("in the way")
    assert load(folder, device="cpu", cache_dir=cache).exact


def test_the_second_start_imports_no_transformers(folder: Path, tmp_path: Path) -> None:
    load(folder, device="cpu", cache_dir=tmp_path / "cache")
    program = (
        "import json, sys\n"
        "from worker.model.loader import load\n"
        "from worker.model.runner import ModelRunner\n"
        f"loaded = load({str(folder)!r}, device='cpu', cache_dir={str(tmp_path / 'cache')!r})\n"
        "ModelRunner(loaded, num_blocks=10, block_size=16)\n"
        "print(json.dumps([loaded.forward.way, 'transformers' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["fused", False]


PEAK = """
import json, sys
from worker.build import build
from headrace.config import WorkerSettings
built = build(WorkerSettings(activations=sys.argv[1], num_kv_blocks=1024, model=sys.argv[2], threads=2))
cache = built.engine.runner.kv
for tensor in (*cache.k, *cache.v, *cache.k_scales, *cache.v_scales):
    tensor.fill_(1)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([cache.num_blocks * cache.block_size, int(status["VmHWM"].split()[0]) * 1024]))
"""


@pytest.mark.model
@pytest.mark.parametrize(("activations", "most"), [("fp32", 1.2e9), ("int8", 0.6e9)])
def test_a_worker_of_the_demo_model_stays_within_its_memory(
    demo_model: Path, activations: str, most: float
) -> None:
    """From the second start on, with all of 16,384 tokens' keys and values written."""
    command = [sys.executable, "-c", PEAK, activations, str(demo_model)]
    kept = prepared.place(demo_model, Path(default_cache_dir()), Forms(activations=activations))
    for _ in range(1 if kept.exists() else 2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stderr
    assert kept.exists()
    tokens, peak = json.loads(done.stdout.splitlines()[-1])
    assert tokens == 16_384
    assert peak < most

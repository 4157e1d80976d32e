"""Processes that share a tiny model, over gloo: the answers of the whole in any crowd; what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from headrace.config import ConfigError, WorkerSettings, load_settings
from headrace.models import ModelError
from worker.build import build
from worker.engine.plan import SequencePlan, StepPlan
from worker.model import tensor_parallel_group
from worker.model.checkpoint import UnsupportedModel
from worker.model.inputs import build_inputs
from worker.model.loader import load
from worker.model.runner import ModelRunner
from worker.model.tensor_parallel import find_cuts
from worker.model.tensor_parallel_group import Group, make_task
from worker.model.tensor_parallel_steps import make_step, plan_of
from worker.model.tensor_parallel_wire import unpack_numbers

PROGRAM = Path(__file__).with_name("tensor_parallel_rank.py")
ROOT = PROGRAM.parents[2]
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}


def save_model(folder: Path, config: Any) -> Path:
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor.normal_(0, 0.3)
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(config.vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return folder


def with_biases(folder: Path) -> Path:
    options = SHAPE | {"vocab_size": 66, "attention_bias": True, "mlp_bias": True}
    return save_model(folder, transformers.LlamaConfig(**options))


def with_head_norms(folder: Path) -> Path:
    """Its logits do not come out even."""
    options = SHAPE | {"vocab_size": 65, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return save_model(folder, transformers.Qwen3Config(**options))


def run_over(folder: Path, size: int) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(size)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def program() -> ModuleType:
    """The program's functions, for a runner of our own."""
    spec = importlib.util.spec_from_file_location("tensor_parallel_rank", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(PROGRAM.parent))
    return module


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize(("make", "size", "kv_heads"), [(with_head_norms, 2, 1), (with_biases, 3, 2)])
def test_several_processes_answer_as_one(make: Any, size: int, kv_heads: int, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    shared = run_over(folder, size)
    whole = load(folder, device="cpu", threads=1)
    expected = program().answers(ModelRunner(whole, num_blocks=120, block_size=16))
    assert shared["ids"] == expected["ids"]
    np.testing.assert_allclose(shared["logprobs"], expected["logprobs"], atol=1e-4)
    assert shared["exact"]
    assert shared["same"], "an answer depends on the crowd"
    assert shared["copied"], "another process has not copied its part of a block"
    assert shared["kv_heads"] == kv_heads
    assert shared["kv_bytes_per_token"] == whole.kv_bytes_per_token
    assert shared["fingerprint"] != whole.fingerprint


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        (transformers.LlamaConfig(**SHAPE), 4, "6 heads over 6 of .* only into 1 or 2 or 3 or 6$"),
        (transformers.LlamaConfig(**SHAPE | {"num_key_value_heads": 2}), 3, "6 heads over 2 of .* 1 or 2$"),
        (transformers.LlamaConfig(**SHAPE | {"intermediate_size": 98}), 3, r"mlp\.\w+ cannot be cut into 3"),
        (transformers.Phi3Config(**SHAPE), 2, "its plan of tensor parallelism wants"),
        (transformers.GptOssConfig(**SHAPE, vocab_size=64), 2, "leaves its layers whole"),
        (transformers.GPT2Config(n_embd=48, n_head=6, n_layer=1), 2, "it has no plan of tensor parallelism"),
    ],
)
def test_a_model_that_cannot_be_cut_is_named(config: Any, size: int, words: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=words):
        find_cuts(model, size)


def test_it_is_refused_in_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    folder = with_biases(tmp_path / "model")
    before = children()
    with pytest.raises(ModelError) as refused:
        load(folder, device="cpu", tensor_parallel=4)
    line = "model model: HEADRACE_TENSOR_PARALLEL=4: 6 heads over 6 of keys and values cannot be cut into "
    assert str(refused.value) == line + "4 equal shares, only into 1 or 2 or 3 or 6; set it to 1"
    assert children() == before


def children() -> set[str]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(path.read_text().split()) if path.exists() else set()


def test_a_process_that_cannot_load_the_model_says_why(tmp_path: Path) -> None:
    group = Group(make_task(2, tmp_path / "missing", torch.device("cpu"), "auto", False, None, threads=2))
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    try:
        with pytest.raises(
            ModelError, match=r"HEADRACE_TENSOR_PARALLEL=2: process 1 cannot load it: .*missing"
        ):
            group.cut(whole)
    finally:
        group.close()


def test_each_process_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensor_parallel_group.dist, "is_backend_available", lambda name: name == "nccl")
    monkeypatch.setattr(tensor_parallel_group.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelError, match="HEADRACE_TENSOR_PARALLEL=4: each process needs a GPU"):
        make_task(4, tmp_path, torch.device("cuda"), "auto", False, None, threads=8)


@pytest.mark.parametrize(
    ("other", "value"),
    [("HEADRACE_WEIGHTS", "q8"), ("HEADRACE_WEIGHTS", "bf16"), ("HEADRACE_ACTIVATIONS", "int8")],
)
def test_forms_of_the_compiled_kernels_are_for_one_process(other: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"HEADRACE_TENSOR_PARALLEL=2: expected 1 with .*{other}={value}"):
        load_settings(WorkerSettings, {"HEADRACE_TENSOR_PARALLEL": "2", other: value})


def test_a_simulated_model_is_not_shared() -> None:
    settings = load_settings(WorkerSettings, {}, {"model": "simulated", "tensor_parallel": "2"})
    with pytest.raises(ConfigError, match="HEADRACE_TENSOR_PARALLEL=2: expected 1 with a simulated model"):
        build(settings)


def test_a_step_arrives_as_it_was_sent() -> None:
    sequences = (SequencePlan(7, [5, 6, 70_000], 30, [3, 9, 4], None), SequencePlan(2, [1], 0, [8], None))
    inputs = build_inputs(StepPlan(4, sequences), 16)
    step = make_step(inputs, torch.tensor([2, 3]), [((1, 2), (3, 4)), ((5, 6),)])
    again = build_inputs(plan_of(step), 16)
    for name in ("token_ids", "positions", "slots", "cu_seqlens", "starts", "fresh_blocks"):
        assert getattr(again, name).tolist() == getattr(inputs, name).tolist(), name
    assert unpack_numbers(step.rows).tolist() == [2, 3]

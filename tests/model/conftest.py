"""Runners over the demo model and tiny random ones, and a small driver in the engine's place."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from headrace.messages import SamplingParams
from headrace.models import ModelError, demo_model_path, model_folder
from worker.engine.plan import SamplePlan, ScoredToken, SequencePlan, StepPlan, StepResult
from worker.model.loader import LoadedModel, load, prepare
from worker.model.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, logprobs=2)


@dataclass
class Sequence:
    """One request as the driver sees it; tokens are prompt and output together."""

    prompt: list[int]
    params: SamplingParams = GREEDY
    seed: int = 0
    choice: int = 0
    output: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)

    def plan(self, seq_id: int, chunk: int) -> SequencePlan:
        tokens = [*self.prompt, *self.output]
        ids = tokens[self.computed : self.computed + chunk]
        sample = None
        if self.computed + len(ids) == len(tokens):
            sample = SamplePlan(
                self.params, self.seed, self.choice, len(self.output), self.prompt, tuple(self.output), False
            )
        return SequencePlan(seq_id, ids, self.computed, self.table, sample)


class Driver:
    """Runs sequences together: scattered blocks, any chunk sizes, each sequence leaving when it is done."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.results: list[StepResult] = []

    def run(
        self, sequences: list[Sequence], num_tokens: int, chunk: Callable[[], int] = lambda: 10_000
    ) -> list[Sequence]:
        """Until each has `num_tokens` of output; `chunk` is asked for each sequence's tokens of a step."""
        block_size = self.runner.kv.block_size
        free = list(range(self.runner.kv.num_blocks))
        self.random.shuffle(free)
        for s in sequences:
            if not s.table:
                count = -(-(len(s.prompt) + num_tokens) // block_size)
                s.table, free = free[:count], free[count:]
                assert len(s.table) == count, "the test needs more blocks"
        step = 0
        while running := [i for i, s in enumerate(sequences) if len(s.output) < num_tokens]:
            self.random.shuffle(running)
            plans = tuple(sequences[i].plan(i, chunk()) for i in running)
            result = self.runner.run(StepPlan(step, plans))
            assert not result.failed
            for plan in plans:
                self._apply(sequences[plan.seq_id], plan, result)
            self.results.append(result)
            step += 1
        return sequences

    def _apply(self, sequence: Sequence, plan: SequencePlan, result: StepResult) -> None:
        sequence.computed += len(plan.token_ids)
        if plan.sample is not None:
            sequence.output.append(result.sampled[plan.seq_id].token_id)
            sequence.scored.append(result.sampled[plan.seq_id])


def make_prompts(count: int, vocab: int, longest: int, seed: int = 7) -> list[list[int]]:
    """Prompts of mixed lengths, from 1 token to `longest`."""
    rng = random.Random(seed)
    lengths = [1, longest, 16, 15, 17, 64, 63, 65, 32, 48]
    lengths += [rng.randint(1, longest) for _ in range(count)]
    return [[rng.randrange(vocab) for _ in range(min(n, longest))] for n in lengths[:count]]


def tiny_runner(
    config: Any,
    *,
    num_blocks: int = 200,
    block_size: int = 16,
    fused: bool = True,
    kv_dtype: str = "auto",
) -> ModelRunner:
    """A runner over a random model of a transformers configuration."""
    loaded, _ = tiny_model(config, fused=fused, kv_dtype=kv_dtype)
    return ModelRunner(loaded, num_blocks=num_blocks, block_size=block_size)


def tiny_llama(form: str, *, num_blocks: int = 200) -> ModelRunner:
    """A random llama of 211 tokens. `form`: its way and, behind a space, its type of keys and values."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=211,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=20,
        max_position_embeddings=512,
    )
    way, _, kv_dtype = form.partition(" ")
    return tiny_runner(config, num_blocks=num_blocks, fused=way == "fused", kv_dtype=kv_dtype or "auto")


def tiny_model(config: Any, *, fused: bool = True, kv_dtype: str = "auto") -> tuple[LoadedModel, Any]:
    """A random model made ready, and an untouched copy of it that runs transformers' own attention."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "eager"
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in plain.named_parameters():
            # weights large enough for attention to matter, norms left near one
            scale = 0.2 if tensor.dim() > 1 else 0.05
            centre = 1.0 if "norm" in name and "weight" in name else 0.0
            tensor.copy_(centre + scale * torch.randn_like(tensor))
    ours.load_state_dict(plain.state_dict())
    loaded = prepare(
        ours,
        name="tiny",
        folder=Path("nowhere"),
        device=torch.device("cpu"),
        fused=fused,
        kv_dtype=kv_dtype,
    )
    return loaded, plain


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above, for tests that cannot import a conftest."""
    return SimpleNamespace(
        Driver=Driver,
        Sequence=Sequence,
        make_prompts=make_prompts,
        tiny_llama=tiny_llama,
        tiny_model=tiny_model,
        tiny_runner=tiny_runner,
        GREEDY=GREEDY,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """HEADRACE_TEST_MODEL, or the demo model if this machine has fetched it."""
    given = os.environ.get("HEADRACE_TEST_MODEL")
    if given:
        return Path(given)
    if not list(model_folder().glob("**/*.gguf")):
        pytest.skip("the demo model is not on this machine; HEADRACE_TEST_MODEL names another place")
    try:
        return demo_model_path()
    except ModelError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def demo(demo_model: Path) -> LoadedModel:
    cache = os.environ.get("HEADRACE_CACHE_DIR") or str(Path.home() / ".cache" / "headrace")
    return load(demo_model, device="cpu", threads=1, cache_dir=cache)


@pytest.fixture(scope="session")
def demo_runner(demo: LoadedModel) -> ModelRunner:
    return ModelRunner(demo, num_blocks=400, block_size=16)

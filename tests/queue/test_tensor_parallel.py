"""A worker of two processes over a real Redis: to producers it is one worker, also when half of it dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.redis,
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]
EXIT_BROKEN = EXIT_STUCK = 70
FIELDS = {"prompt": "t1 t2 t3", "max_tokens": 400, "temperature": 0.9, "seed": 11, "logprobs": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random llama that never ends by itself, with a word for each of its tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        for tensor in llama.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    llama.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def start(pool: Any, model: str, tmp_path: Path) -> Any:
    def start_pair(*flags: str) -> tuple[Any, int]:
        """A worker, and the process id of its other half."""
        cache = str(tmp_path / "cache")
        worker = pool.start("--tensor-parallel", "2", "--cache-dir", cache, *flags, model=model)
        (follower,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        return worker, int(follower)

    return start_pair


@pytest.fixture
def tools(pool: Any) -> Any:
    return sys.modules[type(pool).__module__]


def gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_half_a_worker_is_killed_and_another_goes_on_with_the_same_bytes(pool, tools, start):
    first, follower = start()
    undisturbed = pool.wait_end(pool.submit(id="calm", **FIELDS))
    job = pool.submit(id="hit", **FIELDS)
    pool.wait_tokens(job, 20)
    os.kill(follower, signal.SIGKILL)
    assert first.wait(20) == EXIT_BROKEN
    assert "t_end" not in pool.state(job)
    second, follower = start()
    assert pool.wait_end(job) == undisturbed
    assert int(pool.state(job)["attempt"]) == 2
    second.kill()
    tools.eventually(lambda: gone(follower))


def test_half_a_worker_hangs_and_the_whole_ends(pool, tools, start):
    worker, follower = start("--stall-timeout-s", "1")
    job = pool.submit(**FIELDS)
    pool.wait_tokens(job, 5)
    os.kill(follower, signal.SIGSTOP)
    assert worker.wait(20) == EXIT_STUCK
    tools.eventually(lambda: gone(follower))
    assert "t_end" not in pool.state(job)


def test_all_processes_are_told_to_end_and_the_job_is_given_back_first(pool, tools, start):
    worker, follower = start("--log-format", "json")
    job = pool.submit(**FIELDS)
    pool.wait_tokens(job, 5)
    for pid in (follower, worker.pid):
        os.kill(pid, signal.SIGINT)
    assert worker.wait(20) == 0
    told = [json.loads(line) for line in worker.stderr if line.startswith("{")]
    assert [(e["released"], e["engine_stopped"]) for e in told if e["event"] == "worker_drained"] == [
        (1, True)
    ]
    tools.eventually(lambda: gone(follower))
    assert not pool.redis.zcard(pool.keys.leases)

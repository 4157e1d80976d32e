"""From settings to an engine with a loaded model: the one place that puts the two columns together."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from headrace import PROTOCOL_VERSION, __version__
from headrace.config import AUTO, ConfigError, WorkerSettings, env_name, parse_memory
from worker import simulated
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.scheduler import Scheduler
from worker.queue.intake import ServedModel
from worker.text.codec import TextCodec, load_tokenizer

if TYPE_CHECKING:
    from worker.model.loader import LoadedModel

log = structlog.get_logger("headrace.worker")

TYPICAL_TOKENS = 512  # of a job, prompt and answer, where nothing else is known
AUTO_SHARE_CPU = 0.5  # of free memory, at most
AUTO_SHARE_GPU = 0.7  # the rest is for activations and captured graphs
STATIC_WAIT_S = 1.0  # static batching waits for a full batch; this bounds it at the end of a load


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    model: ServedModel
    card: dict[str, str | int]


def build(settings: WorkerSettings) -> Built:
    """Loads the model and sizes the KV cache. Raises ModelError and ConfigError, each one line."""
    rehearsed = simulated.parse(settings.model or "")
    if rehearsed and settings.tensor_parallel > 1:
        name = env_name("tensor_parallel")
        raise ConfigError(f"{name}={settings.tensor_parallel}: expected 1 with a simulated model")
    return build_simulated(settings, rehearsed) if rehearsed else build_real(settings)


def build_simulated(settings: WorkerSettings, model: simulated.SimulatedModel) -> Built:
    codec = simulated.make_codec()
    num_blocks = settings.num_kv_blocks or 1024
    runner = simulated.SimulatedRunner(model, codec)
    scheduler = Scheduler(engine_config(settings, model.max_model_len, num_blocks, model.speculative_tokens))
    served = ServedModel(
        name=settings.model_name,
        aliases=frozenset({settings.pool, simulated.NAME}),
        codec=codec,
        eos_ids=frozenset({256}),
        vocab_size=codec.vocab_size,
        max_model_len=model.max_model_len,
        kv_tokens=num_blocks * settings.block_size,
        fingerprint=simulated.NAME,
    )
    card = fixed_card(settings, served, num_blocks) | {"device": "none", "exact": 1}
    return Built(Engine(scheduler, runner, time.monotonic), served, card)


def build_real(settings: WorkerSettings) -> Built:
    # Imported late: a rehearsal needs no torch.
    from worker.model.loader import load
    from worker.model.runner import ModelRunner
    from worker.model.trim import trim_memory

    # Where the kernels and the model's other processes look for them, also if set by flags.
    for name in ("kernels", "log_format"):
        os.environ[env_name(name)] = getattr(settings, name)

    loaded = load(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads or None,
        weights=settings.weights,
        activations=settings.activations,
        kv_dtype=settings.kv_dtype,
        trust_remote_code=settings.trust_remote_code,
        cache_dir=settings.cache_dir,
        tensor_parallel=settings.tensor_parallel,
    )
    codec = load_tokenizer(loaded.path, trust_remote_code=settings.trust_remote_code)
    num_blocks = num_kv_blocks(settings, loaded)
    runner = ModelRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        encode_bad_word=lambda word: spellings(codec, word),
    )
    # Bits must not tell whether something was guessed; and on a GPU decode steps are replayed, a token each.
    guesses = settings.speculative_tokens if loaded.exact and loaded.device.type == "cpu" else 0
    ahead = loaded.device.type == "cuda" and runner.steps_in_flight > 1  # on a CPU nobody else computes
    scheduler = Scheduler(engine_config(settings, loaded.max_model_len, num_blocks, guesses, ahead))
    served = ServedModel(
        name=settings.model_name,
        aliases=frozenset({settings.pool, loaded.name}),
        codec=codec,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        kv_tokens=num_blocks * settings.block_size,
        fingerprint=loaded.fingerprint,
    )
    card = fixed_card(settings, served, num_blocks)
    trim_memory()  # the tokenizer's text, and what else was needed once
    card |= {"checkpoint": loaded.name, "exact": int(loaded.exact), "device": str(loaded.device)}
    return Built(Engine(scheduler, runner, time.monotonic), served, card)


def num_kv_blocks(settings: WorkerSettings, loaded: LoadedModel) -> int:
    """Blocks of the KV cache: as set, else what `kv_memory` holds, never more than free memory."""
    bytes_per_block = loaded.kv_bytes_per_token * settings.block_size
    num_blocks = settings.num_kv_blocks or _kv_bytes(settings, loaded) // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"HEADRACE_KV_MEMORY={settings.kv_memory}: a block of {settings.block_size} tokens takes "
            f"{bytes_per_block} bytes; give more"
        )
    log.info(
        "kv_cache_sized",
        num_blocks=num_blocks,
        tokens=num_blocks * settings.block_size,
        mib=num_blocks * bytes_per_block >> 20,
        kv_dtype=str(loaded.kv_dtype).removeprefix("torch."),
    )
    return num_blocks


def _kv_bytes(settings: WorkerSettings, loaded: LoadedModel) -> int:
    """`auto` on a CPU: room for max_num_seqs jobs of typical length, and for one of the full context.

    That is an upper bound: memory is taken as blocks are first used. A GPU takes all at once, and has little
    else to keep it for.
    """
    free_bytes = _free_bytes(loaded)
    if settings.kv_memory != AUTO:
        return min(parse_memory(settings.kv_memory, free_bytes=free_bytes), free_bytes)
    if loaded.device.type == "cuda":
        return int(free_bytes * AUTO_SHARE_GPU)
    tokens = max(settings.max_num_seqs * TYPICAL_TOKENS, loaded.max_model_len)
    whole_blocks = -(-tokens // settings.block_size) * settings.block_size
    return min(whole_blocks * loaded.kv_bytes_per_token, int(free_bytes * AUTO_SHARE_CPU))


def _free_bytes(loaded: LoadedModel) -> int:
    if loaded.device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(loaded.device)[0])
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 33


def engine_config(
    settings: WorkerSettings,
    max_model_len: int,
    num_blocks: int,
    speculative_tokens: int,
    plan_ahead: bool = False,
) -> EngineConfig:
    continuous = settings.batching == "continuous"  # the others are baselines
    wait_s = settings.batch_wait_ms / 1000 if settings.batching == "dynamic" else STATIC_WAIT_S
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        batching=settings.batching,
        batch_wait_s=wait_s,
        policy=settings.policy,
        prefix_cache=settings.prefix_cache,
        adaptive=settings.adaptive and continuous,
        target_itl_ms=settings.target_itl_ms or None,
        speculative_tokens=speculative_tokens if continuous else 0,
        plan_ahead=plan_ahead and continuous,
    )


def fixed_card(settings: WorkerSettings, model: ServedModel, num_blocks: int) -> dict[str, str | int]:
    return {
        "worker": settings.worker_id,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "max_model_len": model.max_model_len,
        "block_size": settings.block_size,
        "num_blocks": num_blocks,
        "batching": settings.batching,
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
    }


def spellings(codec: TextCodec, word: str) -> Sequence[Sequence[int]]:
    """The token sequences of a bad word, at the start of a text and after a space."""
    return [ids for text in (word, " " + word) if (ids := codec.encode_prompt(text))]

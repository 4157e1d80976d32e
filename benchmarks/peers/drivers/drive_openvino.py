"""OpenVINO GenAI's continuous batching, in process.

Arguments: MODEL.gguf, the channel's file descriptor, threads, tokens of the KV cache, most tokens guessed
ahead by prompt lookup (0: none), NAME=VALUE properties.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from channel import Answer, Clock, Request, serve

MAX_BATCHED_TOKENS = 256
MAX_SEQUENCES = 64
KV_BLOCK = 32  # tokens, fixed on the CPU
LOOKUP_NGRAM = 3
# What bears on speed and answers, and which the runtime chooses by itself where it is not told.
TOLD = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


def make_pipeline(model: str, kv_tokens: int, properties: dict[str, Any]) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    scheduler.max_num_seqs = MAX_SEQUENCES
    scheduler.dynamic_split_fuse = True
    scheduler.num_kv_blocks = kv_tokens // KV_BLOCK
    scheduler.enable_prefix_caching = False  # the same prompts come again
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def settings_of(kv_tokens: int, properties: dict[str, Any]) -> dict[str, str | int]:
    """Those given, and the runtime's own choices for the rest."""
    own = {name: openvino.Core().get_property("CPU", name) for name in TOLD}
    shown = {name: _shown(properties.get(name, value)) for name, value in own.items()}
    return {**properties, **shown, "kv_tokens": kv_tokens, "max_num_batched_tokens": MAX_BATCHED_TOKENS}


def _shown(value: Any) -> str | int:
    if isinstance(value, str | int):
        return value
    return str(value.get_type_name() if isinstance(value, openvino.Type) else value)


def greedy(output_tokens: int, guesses: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    if guesses:
        config.num_assistant_tokens, config.max_ngram_size = guesses, LOOKUP_NGRAM
    return config


class Pipeline:
    """Steps while anything runs, and lets requests in when their time has come."""

    def __init__(self, pipeline: Any, guesses: int) -> None:
        self._pipeline, self._guesses = pipeline, guesses

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        clock, waiting, answers = Clock(), list(requests), []
        running: dict[int, tuple[Any, Answer]] = {}
        while waiting or running:
            while waiting and waiting[0].arrive_s <= clock.now_s():
                request = waiting.pop(0)
                answers.append(Answer(request.id, max(request.arrive_s, 0.0)))
                running[request.id] = (self._add(request), answers[-1])
            if not running:
                clock.wait_until(waiting[0].arrive_s)
                continue
            self._pipeline.step()
            self._collect(running, clock.now_s())
        return answers

    def _add(self, request: Request) -> Any:
        ids = openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        return self._pipeline.add_request(request.id, ids, greedy(request.output_tokens, self._guesses))

    def _collect(self, running: dict[int, tuple[Any, Answer]], now_s: float) -> None:
        for key, (handle, answer) in list(running.items()):
            if handle.can_read():
                answer.take(sum(len(part.generated_ids) for part in handle.read().values()), now_s)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[key]


def main(model: str, fd: int, threads: int, kv_tokens: int, guesses: int, given: Sequence[str]) -> None:
    properties: dict[str, Any] = dict(pair.split("=", 1) for pair in given)
    properties["INFERENCE_NUM_THREADS"] = threads
    settings = {**settings_of(kv_tokens, properties), "guesses": guesses}
    if guesses:
        properties["prompt_lookup"] = True
    pipeline = make_pipeline(model, kv_tokens, properties)
    serve(fd, Pipeline(pipeline, guesses).run, settings)


if __name__ == "__main__":
    fd, threads, kv_tokens, guesses = map(int, sys.argv[2:6])
    main(sys.argv[1], fd, threads, kv_tokens, guesses, sys.argv[6:])

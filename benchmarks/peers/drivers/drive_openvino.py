"""OpenVINO GenAI's continuous batching, in process: MODEL.gguf, the channel's file descriptor, threads."""

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
KV_CACHE_GIB = 1


def make_pipeline(model: str, threads: int) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    scheduler.max_num_seqs = MAX_SEQUENCES
    scheduler.dynamic_split_fuse = True
    scheduler.cache_size = KV_CACHE_GIB
    scheduler.enable_prefix_caching = False  # the same prompts come again
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})


def greedy(output_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


class Pipeline:
    """Steps while anything runs, and lets requests in when their time has come."""

    def __init__(self, model: str, threads: int) -> None:
        self._pipeline = make_pipeline(model, threads)

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
        return self._pipeline.add_request(request.id, ids, greedy(request.output_tokens))

    def _collect(self, running: dict[int, tuple[Any, Answer]], now_s: float) -> None:
        for key, (handle, answer) in list(running.items()):
            if handle.can_read():
                answer.take(sum(len(part.generated_ids) for part in handle.read().values()), now_s)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[key]


if __name__ == "__main__":
    serve(int(sys.argv[2]), Pipeline(sys.argv[1], int(sys.argv[3])).run)

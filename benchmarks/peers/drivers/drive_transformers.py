"""transformers in process: folder of fp32 weights, the channel's descriptor, threads, static:N or continuous.

A static batch answers when its longest request is done, so all its tokens come at once; only a batch of one
is read as a stream.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from channel import Answer, Clock, Request, Run, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

PAD_ID = 2
KV_PAGE = 32
KV_BLOCKS = 512
MAX_BATCHED_TOKENS = 512
MAX_SEQUENCES = 64


def load(folder: str, threads: int) -> Any:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_ID
    model.generation_config.do_sample = False
    return model


class Static:
    """Batches of `size` in the order of arrival; each waits for the whole one before it."""

    def __init__(self, model: Any, size: int) -> None:
        self._model = model
        self._size = size

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        clock, answers = Clock(), []
        for first in range(0, len(requests), self._size):
            batch = requests[first : first + self._size]
            clock.wait_until(batch[-1].arrive_s)
            answers += [Answer(request.id, request.arrive_s) for request in batch]
            self._generate(batch, answers[-len(batch) :], clock)
        return answers

    def _generate(self, batch: Sequence[Request], answers: Sequence[Answer], clock: Clock) -> None:
        ids, mask = padded(batch)
        streamer = _Times(answers[0], clock) if len(batch) == 1 else None
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(request.output_tokens for request in batch),
                streamer=streamer,
            )
        if streamer is None:
            for request, answer in zip(batch, answers, strict=True):
                answer.take(request.output_tokens, clock.now_s())


class _Times(BaseStreamer):
    """Notes when each token of a batch of one came."""

    def __init__(self, answer: Answer, clock: Clock) -> None:
        self._answer = answer
        self._clock = clock
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._answer.take(value.numel(), self._clock.now_s())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def padded(batch: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, [batch, longest prompt] int64, filled up on the left."""
    longest = max(len(request.prompt_ids) for request in batch)
    ids = torch.full((len(batch), longest), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, longest - len(request.prompt_ids) :] = 1
    return ids, mask


class Continuous:
    """Its continuous batching manager, fed by a thread at the times of arrival."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._run_number = 0

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        self._run_number += 1
        clock = Clock()
        names = {f"{self._run_number}-{request.id}": request for request in requests}
        answers = {name: Answer(request.id, request.arrive_s) for name, request in names.items()}
        feeder = threading.Thread(target=self._feed, args=(names, clock), daemon=True)
        feeder.start()
        unfinished = set(names)
        while unfinished:
            output = self._manager.get_result(timeout=1)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the continuous batching loop has died")
                continue
            answer = answers[output.request_id]
            answer.take(len(output.generated_tokens) - answer.tokens, clock.now_s())
            if output.is_finished():
                unfinished.discard(output.request_id)
        feeder.join()
        return list(answers.values())

    def _feed(self, names: dict[str, Request], clock: Clock) -> None:
        for name, request in names.items():
            clock.wait_until(request.arrive_s)
            self._manager.add_request(
                request.prompt_ids,
                request_id=name,
                max_new_tokens=request.output_tokens,
                streaming=True,
                eos_token_id=-1,
            )


def with_continuous(model: Any, then: Callable[[Run], None]) -> None:
    config = ContinuousBatchingConfig(
        page_size=KV_PAGE,
        num_blocks=KV_BLOCKS,
        max_batch_tokens=MAX_BATCHED_TOKENS,
        max_requests_per_batch=MAX_SEQUENCES,
        allow_block_sharing=False,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    generation = model.generation_config
    generation.eos_token_id = -1
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        then(Continuous(manager).run)


def main(folder: str, fd: int, threads: int, way: str) -> None:
    model = load(folder, threads)
    if way == "continuous":
        settings = {"dtype": "float32", "kv_tokens": KV_PAGE * KV_BLOCKS, "threads": threads}
        with_continuous(model, lambda run: serve(fd, run, settings))
    else:
        serve(fd, Static(model, int(way.partition(":")[2])).run, {"dtype": "float32", "threads": threads})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

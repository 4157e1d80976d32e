"""vLLM's CPU build, in process: folder of fp32 weights, the channel's descriptor, tokens of the KV cache."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from channel import Answer, Clock, Request, serve
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

MAX_MODEL_LEN = 1024
MAX_SEQUENCES = 64


def bytes_per_token(model: str) -> int:
    """Of its keys and values in fp32."""
    config = json.loads((Path(model) / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


def make_engine(model: str, kv_tokens: int) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQUENCES,
            kv_cache_memory_bytes=kv_tokens * bytes_per_token(model),
            enable_prefix_caching=False,  # the same prompts come again
            disable_log_stats=True,
        )
    )


class Server:
    def __init__(self, model: str, kv_tokens: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(self._start(model, kv_tokens))
        self._run_number = 0

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        self._run_number += 1
        return self._loop.run_until_complete(self._all(requests))

    async def _start(self, model: str, kv_tokens: int) -> AsyncLLM:
        return make_engine(model, kv_tokens)

    async def _all(self, requests: Sequence[Request]) -> list[Answer]:
        clock = Clock()
        return list(await asyncio.gather(*(self._one(request, clock) for request in requests)))

    async def _one(self, request: Request, clock: Clock) -> Answer:
        await asyncio.sleep(max(0.0, request.arrive_s - clock.now_s()))
        answer = Answer(request.id, clock.now_s())
        params = SamplingParams(
            temperature=0,
            max_tokens=request.output_tokens,
            min_tokens=request.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt_ids}
        async for output in self._engine.generate(prompt, params, f"{self._run_number}-{request.id}"):
            answer.take(len(output.outputs[0].token_ids), clock.now_s())
        return answer


if __name__ == "__main__":
    tokens = int(sys.argv[3])
    serve(int(sys.argv[2]), Server(sys.argv[1], tokens).run, {"dtype": "float32", "kv_tokens": tokens})

"""OpenVINO's logits over given tokens, for `benchmarks.quality`.

Arguments: MODEL.gguf, a file for logits, threads, tokens of a window, of a chunk, NAME=VALUE properties.

The pipeline of OpenVINO GenAI gives no logits, but keeps the model that it makes of a GGUF file. That model,
its attention made paged as the pipeline does it, runs here in the pipeline's chunks and over its cache.

Each line of input is a window's token ids. Its answer is "done" once the logits of positions len // 2 to
len - 2, fp32, are in the file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from openvino._offline_transformations import paged_attention_transformation

KV_BLOCK = 32  # tokens, fixed on the CPU


def paged_model(gguf: Path) -> Any:
    """As the pipeline makes it."""
    with tempfile.TemporaryDirectory(prefix="headrace-openvino-") as folder:
        (Path(folder) / gguf.name).symlink_to(gguf)
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = 1
        path = str(Path(folder) / gguf.name)
        genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {"enable_save_ov_model": True})
        model = openvino.Core().read_model(Path(folder) / "openvino_model.xml").clone()
        paged_attention_transformation(model, False, False)
        return model


class Scorer:
    """One sequence at a time, in blocks 0, 1, 2, …"""

    def __init__(self, model: Any, window_tokens: int, chunk_tokens: int, properties: dict[str, Any]) -> None:
        compiled = openvino.Core().compile_model(model, "CPU", properties)
        self._request = compiled.create_infer_request()
        self._chunk_tokens = chunk_tokens
        self._blocks = -(-window_tokens // KV_BLOCK)
        for port in compiled.inputs:
            if port.any_name.startswith(("key_cache", "value_cache")):
                self._request.set_tensor(port.any_name, self._cache(port))

    def logits(self, window: Sequence[int]) -> Any:
        first, last = len(window) // 2, len(window) - 1
        parts = []
        for start in range(0, len(window), self._chunk_tokens):
            chunk = window[start : start + self._chunk_tokens]
            found = self._run(chunk, start)
            parts.append(found[max(first - start, 0) : max(last - start, 0)].copy())
        return np.concatenate(parts)

    def _run(self, ids: Sequence[int], start: int) -> Any:
        end = start + len(ids)
        inputs = {
            "input_ids": np.array(ids, np.int64),
            "position_ids": np.arange(start, end, dtype=np.int64),
            "past_lens": np.array([start], np.int32),
            "subsequence_begins": np.array([0, len(ids)], np.int32),
            "block_indices": np.arange(-(-end // KV_BLOCK), dtype=np.int32),
            "block_indices_begins": np.array([0, -(-end // KV_BLOCK)], np.int32),
            "max_context_len": np.array(end, np.int32),
        }
        for name, value in inputs.items():
            self._request.set_tensor(name, openvino.Tensor(value))
        self._request.infer()
        return self._request.get_output_tensor(0).data.reshape(len(ids), -1)

    def _cache(self, port: Any) -> Any:
        shape = [self._blocks if size.is_dynamic else size.get_length() for size in port.partial_shape]
        return openvino.Tensor(port.element_type, openvino.Shape(shape))


def main(gguf: str, target: str, threads: int, window: int, chunk: int, given: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    properties: dict[str, Any] = dict(pair.split("=", 1) for pair in given)
    scorer = Scorer(paged_model(Path(gguf)), window, chunk, {**properties, "INFERENCE_NUM_THREADS": threads})
    for line in sys.stdin:
        scorer.logits(json.loads(line)).astype(np.float32).tofile(target)
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])

"""A model over several processes, as a worker runs it; the last line says what came of it, as JSON."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from conftest import GREEDY, Driver, Sequence, make_prompts
from worker.engine.plan import SamplePlan, ScoredToken, SequencePlan, StepPlan
from worker.model.loader import load
from worker.model.runner import ModelRunner

TOKENS = 6


def main(folder: str, size: int) -> None:
    loaded = load(folder, device="cpu", threads=size, tensor_parallel=size)
    runner = ModelRunner(loaded, num_blocks=120, block_size=16)
    print(
        json.dumps(
            {
                "exact": loaded.exact,
                "fingerprint": loaded.fingerprint,
                "kv_heads": loaded.layers[0].kv_heads,
                "kv_bytes_per_token": loaded.kv_bytes_per_token,
                **answers(runner),
                "copied": copied_blocks_are_as_good(runner),
            }
        )
    )


def answers(runner: ModelRunner) -> dict[str, Any]:
    """Of each prompt alone and whole, and of all together in chunks: tokens and log-probabilities."""
    prompts = make_prompts(7, runner.loaded.vocab_size, 70)
    driver, sizes = Driver(runner), random.Random(5)
    alone = [driver.run([Sequence(prompt)], TOKENS)[0].scored for prompt in prompts]
    crowd = driver.run([Sequence(prompt) for prompt in prompts], TOKENS, lambda: sizes.randint(1, 20))
    return {
        "ids": [[token.token_id for token in scored] for scored in alone],
        "logprobs": [[token.logprob for token in scored] for scored in alone],
        "same": alone == [sequence.scored for sequence in crowd],
    }


def copied_blocks_are_as_good(runner: ModelRunner) -> bool:
    """Whether a sequence goes on from a copy of its second block as it does from the block itself."""
    sample = SamplePlan(GREEDY, 0, 0, 0, (), (), False)
    runner.run(StepPlan(0, (SequencePlan(0, list(range(20)), 0, [0, 1], sample),)))

    def go_on(table: list[int], copies: tuple[tuple[int, int], ...] = ()) -> ScoredToken:
        return runner.run(StepPlan(1, (SequencePlan(1, [7], 20, table, sample),), copies)).sampled[1]

    runner.run(StepPlan(1, (), ((1, 5),)))  # nothing to compute, and not forgotten
    return go_on([0, 5]) == go_on([0, 1]) == go_on([0, 9], ((5, 9),))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""What guessed tokens are worth: the same requests with and without, in turn, on the engine alone.

    python -m benchmarks.guesses [--activations fp32,int8] [--guesses 8] [--sequences 1,4,32] [--rounds 3]

Three kinds of answers: chats (questions of a sentence, nothing to copy from), edits (a text to be given back
with a small change, as in retrieval and code) and the workload for comparing servers (forced lengths, so that
the model soon repeats itself, which flatters guesses). Every run must give the tokens of the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.exact import workload_requests
from headrace.config import default_cache_dir
from headrace.messages import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.outputs import TokenOutput
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.stats import EngineStats
from worker.model.loader import LoadedModel, load
from worker.model.runner import ModelRunner
from worker.text.codec import TextCodec, load_tokenizer

NUM_BLOCKS, TARGET_ITL_MS = 1456, 100.0
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that sorts a list of dictionaries by a key.",
    "Explain photosynthesis to a child.",
    "List ten capitals of Europe with their countries.",
    "Write a short story about a fox and a river.",
    "What is the difference between TCP and UDP?",
    "Give me a recipe for pancakes.",
    "What causes tides?",
)
TEXTS = (
    "Bread rises because yeast feeds on sugars and releases bubbles of carbon dioxide. The baker kneads the "
    "dough so that gluten holds the gas, and the heat of the oven sets the crumb.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)",
    "The museum opens at nine and closes at five. Tickets are sold until four. Children under twelve pay "
    "nothing, students pay half, and the garden is free for everybody.",
    "Volcanic soil is rich in minerals, which is why farmers return to the slopes after each eruption, and "
    "why the vineyards there are among the oldest of the country.",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts with the most tokens of their answers."""

    name: str
    requests: list[tuple[list[int], int]]
    forced: bool = False
    temperature: float = 0.0


def kinds(codec: TextCodec) -> list[Kind]:
    def chat(content: str) -> list[int]:
        return codec.encode_chat([{"role": "user", "content": content}])

    questions = [(chat(question), 160) for question in QUESTIONS * 4]
    edits = [(chat(f"Repeat this text and correct its mistakes:\n\n{text}"), 96) for text in TEXTS * 8]
    return [
        Kind("chat, greedy", questions),
        Kind("chat, temperature 0.7", questions, temperature=0.7),
        Kind("edit, greedy", edits),
        Kind("workload", workload_requests(), forced=True),
    ]


@dataclass(frozen=True, slots=True)
class Run:
    tokens: dict[str, list[int]]
    tokens_per_s: float
    stats: EngineStats


class Bench:
    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._runner = ModelRunner(loaded, num_blocks=NUM_BLOCKS, block_size=16)

    def run(self, kind: Kind, guesses: int, sequences: int) -> Run:
        """So many requests at a time; of few, as many as are needed for an even load."""
        config = EngineConfig(
            num_blocks=NUM_BLOCKS,
            max_model_len=self._loaded.max_model_len,
            max_num_seqs=sequences,
            prefix_cache=False,
            adaptive=True,
            target_itl_ms=TARGET_ITL_MS,
            speculative_tokens=guesses,
        )
        engine = Engine(Scheduler(config), self._runner, time.monotonic)
        for n, (prompt_ids, length) in enumerate(kind.requests[: max(8, 2 * sequences)]):
            params = SamplingParams(
                max_tokens=length, temperature=kind.temperature, top_p=0.95, ignore_eos=kind.forced
            )
            engine.add(Request(str(n), prompt_ids, params, n, eos_ids=self._loaded.eos_ids))
        tokens: dict[str, list[int]] = {}
        started_s = time.perf_counter()
        while engine.has_work:
            for output in engine.step():
                if isinstance(output, TokenOutput):
                    tokens.setdefault(output.request_id, []).append(output.token_id)
        seconds = time.perf_counter() - started_s
        return Run(tokens, sum(map(len, tokens.values())) / seconds, engine.stats())


def compare(bench: Bench, kind: Kind, guesses: int, sequences: int, rounds: int) -> tuple[str, ...]:
    """A row of the table. Raises ValueError when guesses have changed a token."""
    runs: dict[int, list[Run]] = {0: [], guesses: []}
    for number in range(rounds):
        for count in list(runs) if number % 2 else reversed(runs):
            runs[count].append(bench.run(kind, count, sequences))
    every = [run for of_count in runs.values() for run in of_count]
    if any(run.tokens != every[0].tokens for run in every):
        raise ValueError(f"{kind.name}, {sequences} sequences: answers differ")
    plain, guessed = (statistics.median(run.tokens_per_s for run in of_count) for of_count in runs.values())
    stats = runs[guesses][0].stats
    right = stats.right_guesses / max(stats.guessed_tokens, 1)
    ahead = stats.generated_tokens / (stats.generated_tokens - stats.right_guesses)
    ratio = f"{guessed / plain:.2f}"
    return kind.name, str(sequences), f"{plain:.0f}", f"{guessed:.0f}", ratio, f"{right:.0%}", f"{ahead:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--guesses", type=int, default=8)
    parser.add_argument("--sequences", default="1,4,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    console = Console(width=110)
    for activations in args.activations.split(","):
        cache = Path(default_cache_dir())
        loaded = load(args.model, device="cpu", activations=activations, cache_dir=cache)
        bench = Bench(loaded)
        columns = (
            "answers",
            "sequences",
            "plain, tok/s",
            "guessing, tok/s",
            "ratio",
            "right",
            "tokens a row",
        )
        table = Table(
            *columns, title=f"{activations}, up to {args.guesses} guesses, medians of {args.rounds}"
        )
        for kind in kinds(load_tokenizer(loaded.path)):
            for sequences in map(int, args.sequences.split(",")):
                table.add_row(*compare(bench, kind, args.guesses, sequences, args.rounds))
        console.print(table)


if __name__ == "__main__":
    main()

"""llama.cpp beside it: its own program compares its own logits with the same reference."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality.base import BaseFile, Quality

TIMEOUT_S = 3600
_FIGURE = r"\s*:\s*([\d.einfa+-]+)\s*±\s*([\d.einfa+-]+)"


class LlamaError(Exception):
    """llama-perplexity came to nothing. Carries the end of what it said."""


def measure(program: Path, model: Path, base: BaseFile, threads: int, extra: Sequence[str] = ()) -> Quality:
    """Raises LlamaError."""
    command: list[str | Path] = [program, "-m", model, "--kl-divergence", "--kl-divergence-base", base.path]
    command += ["-c", str(base.size), "-b", str(base.size), "-t", str(threads), *extra]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise LlamaError("\n".join([f"status {done.returncode}", *done.stdout.splitlines()[-5:]]))
    return quality_of(done.stdout, base.rows * len(base.windows))


def quality_of(text: str, tokens: int) -> Quality:
    """From what the program prints. Raises LlamaError."""
    perplexity, kl, top1 = (_figure(text, name) for name in (r"Mean PPL\(Q\)", r"Mean\s+KLD", "Same top p"))
    return Quality(tokens, *perplexity, *kl, top1[0] / 100, top1[1] / 100)


def _figure(text: str, name: str) -> tuple[float, float]:
    """The figure and its standard error."""
    found = re.search(name + _FIGURE, text)
    if found is None:
        raise LlamaError(f"no {name!r} in: {text[-300:]}")
    return float(found[1]), float(found[2])

"""OpenVINO beside it: its logits come from a process in its own environment, one window at a time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.sessions import DRIVERS
from benchmarks.quality.base import BaseFile

CHUNK_TOKENS = 256  # as the pipeline of the comparison in speed is set up


class OpenVinoError(Exception):
    """Its process ended before it answered. Names its log."""


def window_logits(
    python: Path, model: Path, base: BaseFile, threads: int, properties: Sequence[str], log: Path
) -> Iterator[Tensor]:
    """For each window of `base` the logits that count. Raises OpenVinoError."""
    target = base.path.with_suffix(".openvino")
    command: list[str | Path] = [
        python,
        DRIVERS / "score_openvino.py",
        model,
        target,
        str(threads),
        str(base.size),
    ]
    command += [str(CHUNK_TOKENS), *properties]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for window in base.windows:
                process.stdin.write(json.dumps(list(window)).encode() + b"\n")
                process.stdin.flush()
                if process.stdout.readline() != b"done\n":
                    raise OpenVinoError(f"no logits; see {log}")
                found = np.fromfile(target, np.float32).reshape(base.rows, -1)
                yield torch.from_numpy(found[:, : base.vocab_size])
        except BrokenPipeError:
            raise OpenVinoError(f"no logits; see {log}") from None
        finally:
            process.kill()
            target.unlink(missing_ok=True)

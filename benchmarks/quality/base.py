"""Reference log-probabilities in a file that llama.cpp's own `llama-perplexity --kl-divergence` reads too.

So both sides are compared with the same fp32 answers, on the same windows and tokens. The file keeps each
log-probability in 16 bits between the row's largest and 16 below it: what that costs shows in the line of
fp32 compared with itself. In each window of `size` tokens the logits of positions size // 2 to size - 2
count, each scoring the token after it; the tokens before are context.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_MAGIC = b"_logits_"
_SPREAD = 16.0  # nats below the row's largest that are told apart
_STEPS = 65_535
_ROW_HEAD = 4  # 16-bit words: scale and lowest log-probability, each fp32


@dataclass(frozen=True, slots=True)
class Quality:
    """Over `tokens` scored ones; errors are standard errors of the mean. Natural logarithms."""

    tokens: int
    perplexity: float
    perplexity_error: float
    kl: float
    kl_error: float
    top1: float  # share of tokens at which both find the same one likeliest
    top1_error: float


class BaseFile:
    """The reference's log-probabilities for `windows`, all of one length, over `vocab_size` tokens."""

    def __init__(self, path: Path, windows: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.path = path
        self.windows = windows
        self.vocab_size = vocab_size
        self.size = len(windows[0])
        self.first = self.size // 2  # the first position whose logits count
        tokens = np.asarray(windows, np.int32).tobytes()
        self._head = _MAGIC + struct.pack("<Iii", self.size, vocab_size, len(windows)) + tokens
        self._head_bytes = len(self._head)
        self._whole_bytes = self._head_bytes + len(windows) * self.rows * self._row_words * 2

    @property
    def rows(self) -> int:
        """Scored tokens of one window."""
        return self.size - 1 - self.first

    def is_whole(self) -> bool:
        """Whether the file is there and of these windows."""
        if not self.path.exists() or self.path.stat().st_size != self._whole_bytes:
            return False
        with self.path.open("rb") as file:
            return file.read(self._head_bytes) == self._head

    def write(self, logits: Iterable[Tensor]) -> Iterator[Tensor]:
        """`logits`: for each window [rows, vocab_size], fp32. Each comes out again once it is written."""
        with self.path.open("wb") as file:
            file.write(self._head)
            for window in logits:
                file.write(self._packed(window).tobytes())
                file.flush()
                yield window

    def compare(self, logits: Iterable[Tensor]) -> Quality:
        """What another arithmetic's logits, as for `write`, are worth."""
        parts = [self._compare_window(number, window) for number, window in enumerate(logits)]
        nll, kl, same = (torch.cat(each).double() for each in zip(*parts, strict=True))
        perplexity = math.exp(nll.mean())
        return Quality(
            tokens=len(nll),
            perplexity=perplexity,
            perplexity_error=perplexity * _error(nll),
            kl=float(kl.mean()),
            kl_error=_error(kl),
            top1=float(same.mean()),
            top1_error=_error(same),
        )

    def log_probs(self, number: int) -> Tensor:
        """The reference's of one window, as the file has them: [rows, vocab_size] fp32."""
        words = self._row_words
        offset = self._head_bytes + number * self.rows * words * 2
        packed = np.fromfile(self.path, np.uint16, self.rows * words, offset=offset).reshape(self.rows, words)
        head = torch.from_numpy(packed[:, :_ROW_HEAD].copy().view(np.float32))
        levels = torch.from_numpy(packed[:, _ROW_HEAD : _ROW_HEAD + self.vocab_size].astype(np.float32))
        return levels.mul_(head[:, :1]).add_(head[:, 1:])

    @property
    def _row_words(self) -> int:
        return self.vocab_size + self.vocab_size % 2 + _ROW_HEAD

    def _packed(self, logits: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
        log_probs = logits.log_softmax(-1)
        top = log_probs.amax(-1, keepdim=True)
        low = torch.maximum(log_probs.amin(-1, keepdim=True), top - _SPREAD)
        scale = (top - low) / _STEPS
        packed = np.zeros((self.rows, self._row_words), np.uint16)
        packed[:, :_ROW_HEAD] = torch.cat([scale, low], -1).numpy().view(np.uint16)
        levels = ((log_probs - low) / scale).round_().clamp_(min=0)
        packed[:, _ROW_HEAD : _ROW_HEAD + self.vocab_size] = levels.numpy()
        return packed

    def _compare_window(self, number: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each scored token: its negative log-likelihood, the divergence, whether the likeliest agree."""
        own, base = logits.log_softmax(-1), self.log_probs(number)
        targets = torch.tensor(self.windows[number][self.first + 1 :])
        nll = -own.gather(-1, targets[:, None])[:, 0]
        kl = (base.exp() * (base - own)).masked_fill_(base <= -_SPREAD, 0.0).sum(-1)
        return nll, kl, (own.argmax(-1) == base.argmax(-1)).float()


def _error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values)))

import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from benchmarks.quality.__main__ import GROUPS, OURS, named_forms
from benchmarks.quality.base import BaseFile
from benchmarks.quality.llama import LlamaError, quality_of
from benchmarks.quality.openvino import OpenVinoError, window_logits
from benchmarks.quality.text import TextError, windows_of

VOCABULARY = 11
WINDOWS = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1], [0, 9, 0, 9, 0, 9, 0, 9]]


def logits(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [4 * torch.randn(3, VOCABULARY, generator=generator) for _ in WINDOWS]


def written(folder: Path) -> BaseFile:
    base = BaseFile(folder / "base", WINDOWS, VOCABULARY)
    assert len(list(base.write(logits()))) == len(WINDOWS)
    return base


def test_the_second_half_of_each_window_is_scored(tmp_path: Path) -> None:
    found = written(tmp_path).compare(logits())
    losses = []
    for window, rows in zip(WINDOWS, logits(), strict=True):
        for row, target in zip(rows.log_softmax(-1).tolist(), window[5:], strict=True):
            losses.append(-row[target])
    assert found.tokens == 9
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 9), rel=1e-5)


def test_the_reference_is_like_itself(tmp_path: Path) -> None:
    found = written(tmp_path).compare(logits())
    assert abs(found.kl) < 1e-4
    assert (found.top1, found.top1_error) == (1.0, 0.0)


def test_divergence_and_agreement_are_those_of_the_distributions(tmp_path: Path) -> None:
    other = [rows + 0.5 * torch.randn(rows.shape) for rows in logits()]
    found = written(tmp_path).compare(other)
    p, q = (torch.cat(each).double().log_softmax(-1) for each in (logits(), other))
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=1e-4)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_the_file_is_laid_out_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    content = written(tmp_path).path.read_bytes()
    assert content[:8] == b"_logits_"
    assert struct.unpack("<Iii", content[8:20]) == (8, VOCABULARY, 3)
    assert np.frombuffer(content, np.int32, 24, offset=20).tolist() == [t for w in WINDOWS for t in w]
    row_bytes = 2 * (12 + 4)  # an even number of levels behind scale and lowest
    assert len(content) == 20 + 4 * 24 + 3 * 3 * row_bytes
    scale, low = struct.unpack_from("<ff", content, 20 + 4 * 24)
    levels = np.frombuffer(content, np.uint16, VOCABULARY, offset=20 + 4 * 24 + 8)
    expected = logits()[0][0].log_softmax(-1)
    assert low + scale * levels == pytest.approx(expected.numpy(), abs=scale)


def test_a_kept_file_counts_only_for_the_same_windows(tmp_path: Path) -> None:
    base = written(tmp_path)
    assert base.is_whole()
    assert not BaseFile(base.path, WINDOWS[::-1], VOCABULARY).is_whole()
    base.path.write_bytes(base.path.read_bytes()[:-1])
    assert not base.is_whole()


PRINTED = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  11.902311 ±   1.000102
Mean PPL(base)                :  11.892000 ±   0.999000
====== KL divergence statistics ======
Mean    KLD:   0.002831 ±   0.000080
====== Token probability statistics ======
Same top p: 96.380 ± 0.580 %
"""


def test_what_llama_cpp_prints_is_read() -> None:
    found = quality_of(PRINTED, 100)
    assert (found.perplexity, found.perplexity_error) == (11.902311, 1.000102)
    assert (found.kl, found.kl_error) == (0.002831, 0.00008)
    assert (found.top1, found.top1_error) == pytest.approx((0.9638, 0.0058))


def test_a_run_of_llama_cpp_without_figures_is_an_error() -> None:
    with pytest.raises(LlamaError, match="KLD"):
        quality_of(PRINTED.replace("Mean    KLD", "nothing"), 100)


class Characters:
    def encode_prompt(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def test_there_is_text_enough_and_no_more() -> None:
    windows = windows_of(Characters(), 400)  # type: ignore[arg-type]
    assert {len(window) for window in windows} == {1024}
    with pytest.raises(TextError, match="at most"):
        windows_of(Characters(), 1_000)  # type: ignore[arg-type]


def test_a_process_of_openvino_that_dies_is_told(tmp_path: Path) -> None:
    """Our own environment has no OpenVINO, so the driver ends at once."""
    base = BaseFile(tmp_path / "base", WINDOWS, VOCABULARY)
    python, model, log = Path(sys.executable), tmp_path / "model.gguf", tmp_path / "log"
    with pytest.raises(OpenVinoError, match=str(log)):
        list(window_logits(python, model, base, 1, [], log))
    assert "openvino" in log.read_text()


def test_forms_are_named_one_by_one_or_by_whose_they_are() -> None:
    assert named_forms(";".join(GROUPS)) == [name for group in GROUPS.values() for name in group]
    assert named_forms("openvino Q4_1; ours") == ["openvino Q4_1", *OURS]
    with pytest.raises(typer.BadParameter, match="int9"):
        named_forms("headrace int8; headrace int9")

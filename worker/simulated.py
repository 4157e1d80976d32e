"""A model of step times instead of weights, for rehearsals: load, crashes and clients without a GPU.

`--model simulated` or `--model simulated:step_ms=20,token_ms=0.5,crash_on=MARK`. Token n of an answer is a
function of the prompt, the seed, the choice and n, so a stream can be checked byte for byte against `Answer`.
One token is one byte; the words hold emoji and CJK, so characters are split over tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.config import ConfigError
from worker.engine.plan import SamplePlan, ScoredToken, SequencePlan, StepPlan, StepResult
from worker.text.codec import TextCodec
from worker.text.tokenizer_files import TokenizerSource

NAME = "simulated"
OPTIONS = {
    "step_ms": float,
    "token_ms": float,
    "crash_on": str,
    "hang_on": str,
    "max_model_len": int,
    "speculative_tokens": int,
}
WORDS = ("river", "stone", "Wasser", "señal", "été", "水車", "発電", "поток", "🌊", "👩‍🔬", "and", "the", "a")
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A step takes `step_ms`, and `token_ms` a token.

    A prompt with `crash_on` in it ends the process; with `hang_on`, its step never ends.
    """

    step_ms: float = 5.0
    token_ms: float = 0.05
    crash_on: str = ""
    hang_on: str = ""
    max_model_len: int = 8192
    speculative_tokens: int = 0


def parse(model: str) -> SimulatedModel | None:
    """The simulated model that `--model` names; None if it names another. Raises ConfigError."""
    name, _, options = model.partition(":")
    if name != NAME:
        return None
    values: dict[str, float | str | int] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        try:
            values[key] = OPTIONS[key](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"HEADRACE_MODEL={model}: {option!r} is no option of the simulated model"
            ) from None
    return SimulatedModel(**values)  # type: ignore[arg-type]


class SimulatedRunner:
    """A Runner of the engine. Sleeps instead of computing."""

    def __init__(self, model: SimulatedModel, codec: TextCodec) -> None:
        self._model = model
        self._crash_ids = codec.encode_prompt(model.crash_on) if model.crash_on else []
        self._hang_ids = codec.encode_prompt(model.hang_on) if model.hang_on else []
        self._answers: dict[int, Answer] = {}

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep((self._model.step_ms + self._model.token_ms * plan.num_tokens) / 1000)
        sampled: dict[int, ScoredToken] = {}
        guessed: dict[int, tuple[ScoredToken, ...]] = {}
        for sequence in plan.sequences:
            if self._crash_ids and _contains(sequence.token_ids, self._crash_ids):
                os._exit(139)
            if self._hang_ids and _contains(sequence.token_ids, self._hang_ids):
                threading.Event().wait()
            if sequence.sample is not None:
                first, *behind = self._draw_all(sequence, sequence.sample)
                sampled[sequence.seq_id] = first
                guessed[sequence.seq_id] = tuple(behind)
        return StepResult(sampled, guessed=guessed)

    def forget(self, seq_id: int) -> None:
        self._answers.pop(seq_id, None)

    def _draw_all(self, sequence: SequencePlan, sample: SamplePlan) -> list[ScoredToken]:
        """The token behind the last one, and behind each guess that is right."""
        drawn = [self._draw(sequence.seq_id, sample)]
        for n, guess in enumerate(
            sequence.token_ids[len(sequence.token_ids) - sequence.num_guesses :], start=1
        ):
            if drawn[-1].token_id != guess:
                break
            drawn.append(self._draw(sequence.seq_id, sample.behind(n)))
        return drawn

    def _draw(self, seq_id: int, sample: SamplePlan) -> ScoredToken:
        answer = self._answers.get(seq_id)
        if answer is None:
            seed = 0 if sample.params.temperature < _GREEDY_BELOW else sample.seed
            choice = 0 if sample.params.temperature < _GREEDY_BELOW else sample.choice
            answer = self._answers[seq_id] = Answer(sample.prompt_ids, seed, choice)
        token_id = answer.token(sample.position)
        return ScoredToken(token_id, -1.0 / (1 + token_id))


class Answer:
    """The endless answer to one prompt under one seed."""

    def __init__(self, prompt_ids: Sequence[int], seed: int, choice: int) -> None:
        self._key = hashlib.blake2b(json.dumps([list(prompt_ids), seed, choice]).encode()).digest()
        self._bytes = bytearray()
        self._words = 0

    def token(self, position: int) -> int:
        while len(self._bytes) <= position:
            digest = hashlib.blake2b(self._key + self._words.to_bytes(8, "big"), digest_size=2).digest()
            self._bytes += (" " + WORDS[int.from_bytes(digest, "big") % len(WORDS)]).encode()
            self._words += 1
        return self._bytes[position]

    def text(self, num_tokens: int) -> str:
        """The first tokens as text; a character cut at the end is U+FFFD, as in a real answer."""
        return bytes(self.token(n) for n in range(num_tokens)).decode("utf-8", "replace")


def make_codec() -> TextCodec:
    """Bytes as tokens: id = byte; 256 ends an answer."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    by_byte = _byte_alphabet()
    if set(by_byte) != set(alphabet):
        raise RuntimeError("the byte-level alphabet of tokenizers has changed")
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(by_byte)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    source = TokenizerSource(
        tokenizer_json=tokenizer.to_str(),
        special_tokens={"eos_token": "<|end|>"},
        chat_template=CHAT_TEMPLATE,
    )
    return TextCodec(source)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {byte: chr(byte) for byte in shown}
    for n, byte in enumerate(b for b in range(256) if b not in chars):
        chars[byte] = chr(256 + n)
    return [chars[byte] for byte in range(256)]


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    size = len(part)
    return any(list(ids[i : i + size]) == list(part) for i in range(len(ids) - size + 1))

"""What a model folder says of its vocabulary: how many ids its tokenizer knows, which of them end a text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


def tokenizer_vocab_size(folder: Path, logits_width: int) -> int:
    """One more than the tokenizer's highest id, at most `logits_width`; that width without a tokenizer."""
    ids = list(_token_ids(folder).values())
    return min(max(ids) + 1, logits_width) if ids else logits_width


def eos_token_ids(folder: Path, configs: Iterable[Any], logits_width: int) -> frozenset[int]:
    """End-of-sequence ids of all given configurations and of the folder's tokenizer, as far as they exist."""
    found: set[int] = set()
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    known = _token_ids(folder) if text else {}
    if text in known:
        found.add(known[text])
    return frozenset(i for i in found if isinstance(i, int) and 0 <= i < logits_width)


def _token_ids(folder: Path) -> dict[str, int]:
    """Every token of tokenizer.json (or vocab.json) by its text."""
    whole = _json(folder / "tokenizer.json")
    vocab = whole.get("model", {}).get("vocab") or _json(folder / "vocab.json")
    if isinstance(vocab, list):  # Unigram: pairs of token and score
        vocab = {entry[0]: i for i, entry in enumerate(vocab)}
    added = {t["content"]: t["id"] for t in whole.get("added_tokens", [])}
    return {**vocab, **_json(folder / "added_tokens.json"), **added}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file is its own folder
        return {}
    return value if isinstance(value, dict) else {}

"""Where a tokenizer comes from: a Hugging Face folder, or the metadata of a GGUF file.

At run time only the light `tokenizers` library is needed. What it cannot read (GGUF, folders without a
`tokenizer.json`) is converted once by transformers, and the outcome is kept beside the model.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headrace.config import default_cache_dir
from headrace.models import ModelError

log = structlog.get_logger("headrace.text")

_FORMAT = 1
_CACHE_SUFFIX = ".tokenizer-cache.json"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerError(ModelError):
    """The model's folder or file holds no tokenizer that can be used; the message says why."""


class TokenizerSource(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of a tokenizer: what `tokenizers` reads, and what its own format does not say."""

    tokenizer_json: str
    special_tokens: dict[str, str]  # by name: bos_token, eos_token, …
    add_bos_token: bool | None = None  # None: as tokenizer_json's own post-processor does
    chat_template: str | None = None


class _Cached(msgspec.Struct, frozen=True):
    format: int
    made_from: str
    source: TokenizerSource


def read_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> TokenizerSource:
    """The tokenizer of a model folder or GGUF file. Raises TokenizerError."""
    path = Path(path)
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _from_folder(path)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) != 1:
            return _cached(path / "tokenizer", _fingerprint(path.iterdir()), path, None, trust_remote_code)
        path = ggufs[0]
    if not path.is_file():
        raise TokenizerError(f"{path}: no such model folder or file")
    return _cached(path, _fingerprint([path]), path.parent, path.name, trust_remote_code)


def _from_folder(folder: Path) -> TokenizerSource:
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    return TokenizerSource(
        tokenizer_json=(folder / "tokenizer.json").read_text(encoding="utf-8"),
        special_tokens={name: text for name in _SPECIAL_NAMES if (text := _token_text(named.get(name)))},
        add_bos_token=config.get("add_bos_token"),
        chat_template=_template(folder, config.get("chat_template")),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def _token_text(token: object) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _template(folder: Path, configured: object) -> str | None:
    """The chat template: a file of its own wins; of several named ones, `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {entry["name"]: entry["template"] for entry in configured}
        configured = named.get("default", next(iter(named.values()), None))
    return configured if isinstance(configured, str) else None


def _cached(
    beside: Path, made_from: str, folder: Path, gguf_file: str | None, trust_remote_code: bool
) -> TokenizerSource:
    places = _cache_places(beside)
    for place in places:
        try:
            cached = msgspec.json.decode(place.read_bytes(), type=_Cached)
        except (OSError, msgspec.MsgspecError):
            continue
        if cached.format == _FORMAT and cached.made_from == made_from:
            return cached.source
    source = _convert(folder, gguf_file, trust_remote_code)
    _store(places, msgspec.json.encode(_Cached(_FORMAT, made_from, source)))
    return source


def _cache_places(beside: Path) -> tuple[Path, Path]:
    """Beside the model, or in the user's cache when the model's folder is read-only."""
    user_cache = Path(os.environ.get("HEADRACE_CACHE_DIR") or default_cache_dir())
    flat_name = str(beside.resolve()).strip("/").replace("/", "--")
    return (
        beside.with_name(beside.name + _CACHE_SUFFIX),
        user_cache / "tokenizers" / (flat_name[-180:] + _CACHE_SUFFIX),
    )


def _fingerprint(files: Iterable[Path]) -> str:
    stats = [(f.name, f.stat()) for f in sorted(files) if f.is_file() and not f.name.endswith(_CACHE_SUFFIX)]
    return ";".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def _store(places: Iterable[Path], content: bytes) -> None:
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, content)
            return
        except OSError as error:
            log.info("tokenizer_not_cached", path=str(place), reason=error.strerror)


def _replace(place: Path, content: bytes) -> None:
    """All or nothing, so that a worker starting beside us never reads half a file."""
    handle, name = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
        os.replace(name, place)
    except OSError:
        os.unlink(name)
        raise


def _convert(folder: Path, gguf_file: str | None, trust_remote_code: bool) -> TokenizerSource:
    from transformers import AutoTokenizer  # slow to import, and needed once for each model

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **extra)
    except Exception as error:
        raise TokenizerError(f"{folder / (gguf_file or '')}: no tokenizer can be read ({error})") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"{folder}: its tokenizer exists in Python only; save a fast one (tokenizer.json) beside it"
        )
    template = tokenizer.chat_template
    return TokenizerSource(
        tokenizer_json=backend.to_str(),
        special_tokens={n: t for n in _SPECIAL_NAMES if isinstance(t := getattr(tokenizer, n, None), str)},
        add_bos_token=getattr(tokenizer, "add_bos_token", None),
        chat_template=template if isinstance(template, str) else (template or {}).get("default"),
    )

"""Prompts to ids, and tokenizers from every kind of folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace.errors import HeadraceError
from worker.text.codec import TextCodec, load_tokenizer
from worker.text.tokenizer_files import TokenizerError, TokenizerSource


def test_bos_comes_once(spm_codec: TextCodec) -> None:
    assert spm_codec.encode_prompt("the")[0] == 1
    assert spm_codec.encode_prompt("<s>the").count(1) == 1
    assert spm_codec.encode_prompt("") == [1]


@pytest.mark.parametrize(("add_bos", "expected"), [(True, 1), (False, 0), (None, 0)])
def test_the_model_s_own_word_on_bos(
    add_bos: bool | None,
    expected: int,
    make_codec: Callable[..., TextCodec],
    tokenizers_by_family: dict[str, Tokenizer],
) -> None:
    named = {"bos_token": "<|endoftext|>"}
    codec = make_codec(tokenizers_by_family["byte_level"], add_bos_token=add_bos, special_tokens=named)
    [bos] = codec.encode_prompt("<|endoftext|>")
    assert bos == codec.bos_id
    assert codec.encode_prompt("the").count(bos) == expected
    assert codec.encode_prompt("<|endoftext|>the").count(bos) == 1


def test_no_bos_where_the_model_says_so_against_its_post_processor(
    make_codec: Callable[..., TextCodec], tokenizers_by_family: dict[str, Tokenizer]
) -> None:
    codec = make_codec(
        tokenizers_by_family["sentencepiece"], add_bos_token=False, special_tokens={"bos_token": "<s>"}
    )
    assert 1 not in codec.encode_prompt("the")


def test_control_tokens_in_a_raw_prompt_are_control_tokens(byte_codec: TextCodec) -> None:
    ids = byte_codec.encode_prompt("<|im_start|>user")
    assert byte_codec.token_bytes(ids[0]) == b"<|im_start|>"


@pytest.mark.parametrize(
    ("prompt", "code"), [("x" * ((1 << 20) + 1), "too_large"), ("\ud83d", "invalid_request")]
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt: str, code: str, byte_codec: TextCodec) -> None:
    with pytest.raises(HeadraceError) as refusal:
        byte_codec.encode_prompt(prompt)
    assert (refusal.value.code, refusal.value.field) == (code, "prompt")


def test_what_a_file_says_about_truncation_and_padding_is_not_for_serving(
    make_codec: Callable[..., TextCodec],
) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(_word_level()))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    assert make_codec(tokenizer).encode_prompt("one two one") == [1, 2, 1]


def test_a_folder_with_tokenizer_json_needs_no_transformers(tmp_path: Path) -> None:
    _write(tmp_path, "tokenizer.json", _word_level())
    config = {
        "bos_token": {"content": "one", "lstrip": False},
        "eos_token": "two",
        "add_bos_token": True,
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ messages[0]['content'] }} {{ eos_token }}"},
        ],
    }
    _write(tmp_path, "tokenizer_config.json", config)
    probe = (
        "import sys; from worker.text.codec import load_tokenizer; c = load_tokenizer(sys.argv[1]);"
        "chat = c.encode_chat([{'role': 'user', 'content': 'one'}]);"
        "print(c.encode_prompt('two'), chat, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "[1, 2] [1, 2] False"


def test_a_template_of_its_own_file_wins(tmp_path: Path) -> None:
    _write(tmp_path, "tokenizer.json", _word_level())
    _write(tmp_path, "tokenizer_config.json", {"chat_template": "{{ 'two' }}"})
    (tmp_path / "chat_template.jinja").write_text("{{ 'one' }}")
    assert load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}]) == [1]


@pytest.mark.parametrize("make", ["nothing", "empty", "broken"])
def test_what_holds_no_tokenizer_says_why(make: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if make != "nothing":
        path.mkdir()
    if make == "broken":
        _write(path, "tokenizer.json", _word_level())
        (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="model"):
        load_tokenizer(path)


def test_a_folder_without_a_fast_tokenizer_is_converted_once(tmp_path: Path) -> None:
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", "a", "b", "ab"])}
    _write(tmp_path, "vocab.json", vocab)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    _write(tmp_path, "config.json", {"model_type": "gpt2"})
    first = load_tokenizer(tmp_path)
    assert first.encode_prompt("aba") == [3, 1]
    cached = list(tmp_path.glob("*tokenizer-cache.json"))
    assert len(cached) == 1
    written = cached[0].stat().st_mtime_ns
    assert load_tokenizer(tmp_path).encode_prompt("aba") == [3, 1]
    assert cached[0].stat().st_mtime_ns == written
    cached[0].write_bytes(b"{ half a fi")
    assert load_tokenizer(tmp_path).encode_prompt("aba") == [3, 1]


def test_a_read_only_model_folder_is_cached_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TokenizerSource(tokenizer_json=json.dumps(_word_level()), special_tokens={})
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    (
        tmp_path / "model.gguf.tokenizer-cache.json"
    ).mkdir()  # cannot be replaced by a file, whoever runs the test
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("worker.text.tokenizer_files._convert", lambda *_: source)
    assert load_tokenizer(gguf).encode_prompt("one two") == [1, 2]
    monkeypatch.setattr("worker.text.tokenizer_files._convert", lambda *_: pytest.fail("converted again"))
    assert load_tokenizer(gguf).encode_prompt("one two") == [1, 2]
    assert not list(tmp_path.glob("tmp*"))


def _word_level() -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "one": 1, "two": 2}, "unk_token": "[UNK]"}
    blank = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {
        **blank,
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": model,
    }


def _write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))

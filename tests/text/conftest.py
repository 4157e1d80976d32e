"""Small tokenizers of every family, built here: no file, no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker.text.codec import TextCodec
from worker.text.pieces import byte_level_alphabet
from worker.text.tokenizer_files import TokenizerSource

# Machines that run tests are shared: how long one example takes says nothing.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def codec_of(tokenizer: Tokenizer, **source: Any) -> TextCodec:
    named = source.pop("special_tokens", {})
    return TextCodec(TokenizerSource(tokenizer_json=tokenizer.to_str(), special_tokens=named, **source))


def build_byte_level() -> Tokenizer:
    """Every byte, a few merges that cut through characters, special tokens, one ordinary added token."""
    alphabet = list(byte_level_alphabet())
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("ð", "Ł"),
        ("ðŁ", "ĺ"),
        ("Ã", "©"),
        ("l", "l"),
        ("E", "N"),
    ]
    vocab = {text: i for i, text in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("    ", normalized=False)])
    return tokenizer


def build_sentencepiece() -> Tokenizer:
    """As Llama 2 has it: BOS, a space before the text, byte fallback, one leading space dropped again."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*"▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>|/_[]", "é", "▁the", "▁▁", "he", "▁a"]
    vocab = {text: i for i, text in enumerate([*words, *letters, "▁t"])}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("▁", "▁"), ("▁", "a")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def build_metaspace() -> Tokenizer:
    """A unigram vocabulary in which the special tokens are ordinary pieces as well."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        "▁",
        "▁hello",
        "▁world",
        "o",
        "h",
        "e",
        "l",
        "w",
        "r",
        "d",
        "<",
        ">",
        "s",
        "/",
    ]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def build_wordpiece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "play", "##ing", "##s", "the", "game", ".", ",", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def build_word_ends() -> Tokenizer:
    """As the first GPT had it: the end of a word is part of its last token."""
    words = ["<unk>", "hello</w>", "wor", "ld</w>", "a", "</w>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def build_word_level() -> Tokenizer:
    return Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": build_byte_level,
    "sentencepiece": build_sentencepiece,
    "metaspace": build_metaspace,
    "wordpiece": build_wordpiece,
    "word_ends": build_word_ends,
    "word_level": build_word_level,
}


@pytest.fixture(scope="session")
def tokenizers_by_family() -> dict[str, Tokenizer]:
    return {name: build() for name, build in FAMILIES.items()}


@pytest.fixture(scope="session")
def codecs_by_family(tokenizers_by_family: dict[str, Tokenizer]) -> dict[str, TextCodec]:
    return {name: codec_of(tokenizer) for name, tokenizer in tokenizers_by_family.items()}


@pytest.fixture(scope="session")
def byte_codec(tokenizers_by_family: dict[str, Tokenizer]) -> TextCodec:
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return codec_of(tokenizers_by_family["byte_level"], chat_template=CHATML, special_tokens=named)


@pytest.fixture(scope="session")
def spm_codec(tokenizers_by_family: dict[str, Tokenizer]) -> TextCodec:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return codec_of(tokenizers_by_family["sentencepiece"], special_tokens=named)


@pytest.fixture(scope="session")
def make_codec() -> Callable[..., TextCodec]:
    """codec_of, for tests that need a template or flags of their own."""
    return codec_of


@pytest.fixture(scope="session")
def spell() -> Callable[[TextCodec, Sequence[str]], list[int]]:
    """Ids of tokens by their spelling in the vocabulary."""

    def ids_of(codec: TextCodec, tokens: Sequence[str]) -> list[int]:
        by_text = {codec.token_text(i): i for i in range(codec.vocab_size)}
        return [by_text[token] for token in tokens]

    return ids_of

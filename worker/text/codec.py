"""Text to token ids and back, for one model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from headrace.errors import HeadraceError
from worker.text.chat import ChatTemplate
from worker.text.detokenizer import Detokenizer
from worker.text.fence import RenderedPiece
from worker.text.pieces import PieceTable, token_text
from worker.text.tokenizer_files import TokenizerSource, read_tokenizer

DEFAULT_MAX_CHARS = 1 << 20


class _Description(msgspec.Struct):
    """The little of a tokenizer.json that is read here; its vocabulary is stepped over."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, max_chars: int = DEFAULT_MAX_CHARS
) -> TextCodec:
    """The codec of a Hugging Face folder or a GGUF file. Raises TokenizerError."""
    return TextCodec(read_tokenizer(path, trust_remote_code=trust_remote_code), max_chars=max_chars)


class TextCodec:
    """Encodes prompts and chats, decodes ids. Any thread may use it: it only remembers what it has computed.

    `special_ids` are the tokens left out of text by skip_special_tokens. `bos_id`, `eos_id` are None where
    the tokenizer names none.
    """

    def __init__(self, source: TokenizerSource, *, max_chars: int = DEFAULT_MAX_CHARS) -> None:
        description = msgspec.json.decode(source.tokenizer_json, type=_Description)
        self._max_chars = max_chars
        self._tokenizer = _ready(Tokenizer.from_str(source.tokenizer_json))
        self._pieces = PieceTable(self._tokenizer, description.decoder)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        named = {name: self._tokenizer.token_to_id(text) for name, text in source.special_tokens.items()}
        self.bos_id: int | None = named.get("bos_token")
        self.eos_id: int | None = named.get("eos_token")
        added = description.added_tokens
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self.special_texts = tuple(token["content"] for token in added if token["special"])
        self._add_bos = source.add_bos_token
        controls = _control_tokens(added, source.chat_template or "")
        self._control_ids = frozenset(token["id"] for token in controls) - {named.get("unk_token")}
        self._spelt: dict[str, list[int]] = {}
        self._controls = {token["content"] for token in controls}
        self._template: ChatTemplate | None = None
        if source.chat_template is not None:
            texts = [token["content"] for token in controls]
            self._template = ChatTemplate(source.chat_template, source.special_tokens, texts)

    @cached_property
    def _plain(self) -> Tokenizer:
        """Made when a text first spells a control token, for it is as large as the other."""
        return _without_control_tokens(self._tokenizer.to_str(), self._controls)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a raw prompt, begun with BOS once where the model wants one.

        Control tokens spelt in a raw prompt are control tokens: whoever sends one speaks to the model
        directly. Raises HeadraceError `too_large` or `invalid_request`.
        """
        self._check_size(len(prompt), "prompt")
        ids = self._encode(prompt, "prompt", add_special_tokens=True)
        bos = self.bos_id
        if bos is None:
            return ids
        if self._add_bos is True and ids[:1] != [bos]:
            return [bos, *ids]
        if self._add_bos is False and ids[:1] == [bos]:  # keep it only where the prompt itself spells it
            return self._encode(prompt, "prompt", add_special_tokens=False)
        return ids[1:] if ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, now: datetime | None = None) -> list[int]:
        """Ids of a chat by the model's template, the assistant's turn opened.

        Control tokens spelt inside messages stay plain text. `now` is the date a template may write: give the
        time of submission, so that a chat encoded again later is the same. Raises HeadraceError naming the
        field.
        """
        if self._template is None:
            raise HeadraceError(
                "invalid_request",
                "This model has no chat template: send a `prompt` instead of `messages`, or serve a model "
                "whose tokenizer has one.",
                "messages",
            )
        self._check_size(len(json.dumps(messages, default=str, ensure_ascii=False)), "messages")
        pieces = self._template.render(messages, now)
        self._check_size(sum(len(piece.text) for piece in pieces), "messages")
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            ids += self._encode_piece(piece, within=i > 0)
        return ids

    def detokenizer(self, *, skip_special: bool, continued: bool) -> Detokenizer:
        """A new detokenizer; `continued` says that text stands before the first id."""
        return Detokenizer(self._pieces, self.special_ids, skip_special=skip_special, continued=continued)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continued: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        detokenizer = self.detokenizer(skip_special=skip_special, continued=continued)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that goes on; special tokens as spelt; b"" outside the vocabulary."""
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it; "" outside the vocabulary."""
        return token_text(self._tokenizer, token_id) or ""

    def has_text(self, ids: Sequence[int]) -> bool:
        """Whether any of `ids` is more than a special token."""
        return any(token_id not in self.special_ids for token_id in ids)

    def _encode_piece(self, piece: RenderedPiece, *, within: bool) -> list[int]:
        if piece.plain:
            return self._spelt_out(piece.text)
        if within:
            return self._encode_within(self._tokenizer, piece.text)
        return self._encode(piece.text, "messages", add_special_tokens=False)

    def _spelt_out(self, control: str) -> list[int]:
        """The spelling of a control token as ordinary text; kept, for there are few of them."""
        ids = self._spelt.get(control)
        if ids is None:
            ids = self._spelt[control] = self._spell(control)
        return ids

    def _spell(self, control: str) -> list[int]:
        ids = self._encode_within(self._plain, control)
        if not self._control_ids.isdisjoint(ids):
            # The model's own vocabulary holds the spelling as one token: no single character of it does.
            ids = [i for char in control for i in self._encode_within(self._plain, char)]
        if not self._control_ids.isdisjoint(ids):
            raise HeadraceError(
                "invalid_request", f"A message spells the control token {control!r}.", "messages"
            )
        return ids

    def _encode_within(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Ids of a text that stands behind another: without the space SentencePiece begins a text with."""
        anchor = _encode(tokenizer, "\n", "messages", add_special_tokens=False)
        ids = _encode(tokenizer, "\n" + text, "messages", add_special_tokens=False)
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
        return _encode(tokenizer, text, "messages", add_special_tokens=False)

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        return _encode(self._tokenizer, text, field, add_special_tokens=add_special_tokens)

    def _check_size(self, num_chars: int, field: str) -> None:
        if num_chars > self._max_chars:
            raise HeadraceError("too_large", f"More than {self._max_chars} characters.", field)


def _encode(tokenizer: Tokenizer, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except (UnicodeEncodeError, TypeError) as error:  # half a surrogate pair, which JSON lets through
        raise HeadraceError("invalid_request", "The text is not valid Unicode.", field) from error


def _ready(tokenizer: Tokenizer) -> Tokenizer:
    """Whole texts only: what a file says about truncation and padding was meant for training."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _control_tokens(added: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Special tokens, and those ordinary added ones that the chat template writes itself (`<tool_call>`)."""
    return [t for t in added if t["special"] or (t["content"].strip() and t["content"] in template)]


def _without_control_tokens(tokenizer_json: str, controls: set[str]) -> Tokenizer:
    """The same tokenizer, reading the spelling of a control token as ordinary text."""
    description = json.loads(tokenizer_json)
    added = [{**t, "special": t["special"] or t["content"] in controls} for t in description["added_tokens"]]
    tokenizer = _ready(Tokenizer.from_str(json.dumps({**description, "added_tokens": added})))
    tokenizer.encode_special_tokens = True
    return tokenizer

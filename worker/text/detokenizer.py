"""Token ids to text, one at a time: whole characters only, and no text is decoded twice."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from worker.text.pieces import PieceTable


class Detokenizer:
    """Joins the bytes of tokens and hands out the characters that are complete.

    The text is the tokens' bytes read as UTF-8, each invalid sequence replaced by U+FFFD; `push` and one last
    `finish` together give exactly that, in time linear in the number of ids.

    `continued` says that text stands before the first id (a prompt): SentencePiece then keeps its leading
    space.
    """

    def __init__(
        self, pieces: PieceTable, special_ids: Collection[int], *, skip_special: bool, continued: bool
    ) -> None:
        self._pieces = pieces
        self._hidden = special_ids if skip_special else frozenset()
        self._first = not continued
        self._leading_spaces = 0 if continued else pieces.num_leading_spaces_dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def hides(self, token_id: int) -> bool:
        """Whether this token leaves no trace in the text."""
        return token_id in self._hidden

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none, in the middle of a character."""
        if self.hides(token_id):
            return ""
        piece = self._pieces.bytes_of(token_id, first=self._first)
        self._first = self._first and not self._pieces.knows(token_id)
        if self._leading_spaces:
            piece = self._drop_leading_spaces(piece)
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """U+FFFD if the last character never got complete, else nothing; nothing when called again."""
        return self._utf8.decode(b"", True)

    def _drop_leading_spaces(self, piece: bytes) -> bytes:
        while self._leading_spaces and piece.startswith(b" "):
            piece, self._leading_spaces = piece[1:], self._leading_spaces - 1
        if piece:
            self._leading_spaces = 0
        return piece

"""What each token id stands for: its bytes, its kind, its spelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from engine.errors import BatchRefused
from engine.weights.vocabulary import TokenKind

SPACE = "\u2581"  # what SentencePiece writes for a space
_HIDDEN = (TokenKind.CONTROL, TokenKind.UNKNOWN)

#: Texts that end a turn or a document in the families we read, where they are control tokens.
_END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eot|>",
    "</s>",
    "<eos>",
    "[EOT]",
)


class Spelling(StrEnum):
    """How a vocabulary writes bytes."""

    BYTE_LEVEL = "byte-level"  # every byte is a printable character (GPT-2)
    SENTENCEPIECE = "sentencepiece"  # U+2581 is a space, <0xNN> a byte


def _byte_of_character() -> Mapping[str, int]:
    """GPT-2's table: printable Latin-1 characters are themselves, the others follow from U+0100 on."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in itself}
    shifted = (b for b in range(256) if b not in set(itself))
    table.update((chr(256 + n), b) for n, b in enumerate(shifted))
    return MappingProxyType(table)


_BYTES = _byte_of_character()


class TokenTable:
    """Token ids to bytes. `tokens` and `kinds` are parallel; an id outside them raises BatchRefused."""

    def __init__(self, tokens: Sequence[str], kinds: Sequence[int], spelling: Spelling) -> None:
        assert len(tokens) == len(kinds), "every token has a kind"
        self._tokens = tokens
        self._kinds = kinds
        self.spelling = spelling

    def __len__(self) -> int:
        return len(self._kinds)

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        return self._tokens[self._checked(token)]

    def is_control(self, token: int) -> bool:
        return self._kinds[self._checked(token)] in _HIDDEN

    def bytes_of(self, token: int) -> bytes:
        """The text that the token stands for, in UTF-8 (perhaps a part of a character); b"" for control."""
        kind = self._kinds[self._checked(token)]
        if kind in _HIDDEN:
            return b""
        text = self._tokens[token]
        if kind == TokenKind.USER_DEFINED:
            return text.encode()
        if self.spelling is Spelling.SENTENCEPIECE:
            if kind == TokenKind.BYTE:
                return bytes((int(text[3:5], 16),))
            return text.replace(SPACE, " ").encode()
        try:
            return bytes([_BYTES[c] for c in text])
        except KeyError:  # a token outside the byte alphabet stands for its own text
            return text.encode()

    @cached_property
    def controls(self) -> Mapping[str, int]:
        """Every control token (and unknown), text to id."""
        ids = (i for i, kind in enumerate(self._kinds) if kind in _HIDDEN)
        return MappingProxyType({self._tokens[i]: i for i in ids})

    def ends(self, named: Sequence[int | None]) -> frozenset[int]:
        """The ids that end a reply: those that the file names, and the well-known ones."""
        known = (self.controls[text] for text in _END_TEXTS if text in self.controls)
        return frozenset(known) | {i for i in named if i is not None}

    def _checked(self, token: int) -> int:
        if not 0 <= token < len(self._kinds):
            raise BatchRefused(f"token {token} is not in a vocabulary of {len(self._kinds)}")
        return token

"""Where a rendered conversation and the token ids that were really fed part ways.

Generated ids are kept as they are and never tokenized again. Before each turn the whole conversation is
rendered by the chat template; here that text is laid over the ids at hand, byte by byte, and the
longest run of ids that agrees is reused. What follows is tokenized and fed. Nothing is assumed about a
template: if it drops or rewrites earlier text, the place is found and told.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import EditRefused
from engine.tokenizer import TextPiece, Tokenizer

#: Control tokens take part in the comparison as this byte, which UTF-8 never uses, and their id.
_CONTROL = b"\xff"

#: Halves of characters, which a string of Python holds where bytes were no UTF-8; they cannot be stored.
_HALVES = re.compile("[\ud800-\udfff]")

#: How many of the last ids are looked for to find a place in a conversation: as many as are behind the
#: hole that a shift left, which is not known here.
_ANCHORS = (256, 128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Alignment:
    """`kept` ids are reused; `ids` follow them. `diverged` is the position of the first id at hand
    that the rendered text contradicts, or None when the text goes on where the ids end."""

    kept: int
    ids: tuple[int, ...]
    diverged: int | None


@dataclass(frozen=True, slots=True)
class Spelled:
    """The text that one id adds, and whether it ends between characters."""

    text: bytes
    whole: bool


def whole_characters(text: str) -> str:
    """`text` as it can be written down: half a character becomes U+FFFD."""
    return _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)


def align(ids: Sequence[int], pieces: Sequence[TextPiece], tokenizer: Tokenizer, begun: int = 0) -> Alignment:
    """Lay the rendered `pieces` over the fed (and pending) `ids`, behind the first `begun` of them, which no
    template laid out."""
    if begun:
        plan = _laid(ids[begun:], _joined(pieces), tokenizer)
        diverged = None if plan.diverged is None else plan.diverged + begun
        return Alignment(plan.kept + begun, plan.ids, diverged)
    return _laid(ids, _runs(pieces, tokenizer), tokenizer)


def _laid(ids: Sequence[int], runs: Sequence[TextPiece], tokenizer: Tokenizer) -> Alignment:
    spelled = spell(ids, tokenizer)
    ends = np.cumsum([len(each.text) for each in spelled], dtype=np.int64)
    have = b"".join(each.text for each in spelled)
    want = b"".join(_render(run, tokenizer) for run in runs)
    common = _common_prefix(have, want)
    kept = int(np.searchsorted(ends, common, side="right"))
    while 0 < kept < len(ids) and not spelled[kept - 1].whole:
        kept -= 1
    while kept and not _can_cut(runs, int(ends[kept - 1]), tokenizer):
        kept -= 1
    rest = _drop(runs, int(ends[kept - 1]) if kept else 0, tokenizer)
    return Alignment(kept, tuple(tokenizer.encode_pieces(rest)), kept if common < len(have) else None)


def align_tail(ids: Sequence[int], pieces: Sequence[TextPiece], tokenizer: Tokenizer) -> Alignment:
    """As `align`, for ids that a context shift took a piece out of: their last text is looked for in
    the rendered one, and what follows it is new. Raises EditRefused when it is not there."""
    runs = _runs(pieces, tokenizer)
    want = b"".join(_render(run, tokenizer) for run in runs)
    spelled = spell(ids, tokenizer)
    for count in _ANCHORS:
        tail = b"".join(each.text for each in spelled[-count:])
        found = want.rfind(tail)
        if found >= 0 and _can_cut(runs, found + len(tail), tokenizer):
            rest = _drop(runs, found + len(tail), tokenizer)
            return Alignment(len(ids), tuple(tokenizer.encode_pieces(rest)), None)
    raise EditRefused(
        "after a context shift the conversation can only go on where it stopped, "
        "and the chat template does not render its last words as they were said"
    )


def _runs(pieces: Sequence[TextPiece], tokenizer: Tokenizer) -> list[TextPiece]:
    """The prompt as it is tokenized: neighbouring texts joined, BOS in front where the model wants it."""
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        bos = TextPiece(tokenizer.token_text(tokenizer.bos_id), special=True)
        if list(pieces[:1]) != [bos]:
            return _joined((bos, *pieces))
    return _joined(pieces)


def _joined(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    runs: list[TextPiece] = []
    for piece in pieces:
        if runs and not piece.special and not runs[-1].special:
            runs[-1] = TextPiece(runs[-1].text + piece.text)
        elif piece.text:
            runs.append(piece)
    return runs


def spell(ids: Sequence[int], tokenizer: Tokenizer) -> list[Spelled]:
    """What each id adds to the text, as a reader of the stream was shown it: a character comes with its
    last id, bytes that are no UTF-8 are U+FFFD, and a character that a control token cuts off is nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    spelled = []
    for token in ids:
        if tokenizer.is_special(token):
            decoder.reset()
            spelled.append(Spelled(_control(token), True))
        else:
            text = decoder.decode(tokenizer.token_bytes(token)).encode("utf-8")
            spelled.append(Spelled(text, decoder.getstate()[0] == b""))
    return spelled


def _control(token: int) -> bytes:
    return _CONTROL + token.to_bytes(4, "little")


def _render(run: TextPiece, tokenizer: Tokenizer) -> bytes:
    """A run as its ids will spell it: encoding puts the tokenizer's prefix before every text."""
    if run.special:
        return b"".join(map(_control, tokenizer.encode_special(run.text)))
    return tokenizer.rules.prefix + run.text.encode("utf-8", "surrogatepass")


def _common_prefix(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.frombuffer(a, np.uint8, n) != np.frombuffer(b, np.uint8, n))
    return int(differ[0]) if len(differ) else n


def _can_cut(runs: Sequence[TextPiece], at: int, tokenizer: Tokenizer) -> bool:
    """Whether the text can be tokenized from byte `at` on: between runs always, inside a text between
    characters, unless the tokenizer would put its prefix there."""
    for run in runs:
        rendered = _render(run, tokenizer)
        if at < len(rendered):
            return at == 0 or not (run.special or tokenizer.rules.prefix or rendered[at] & 0xC0 == 0x80)
        at -= len(rendered)
    return at == 0


def _drop(runs: Sequence[TextPiece], nbytes: int, tokenizer: Tokenizer) -> list[TextPiece]:
    """The runs without their first `nbytes` bytes."""
    rest: list[TextPiece] = []
    for run in runs:
        rendered = _render(run, tokenizer)
        if nbytes >= len(rendered):
            nbytes -= len(rendered)
        elif nbytes == 0:
            rest.append(run)
        else:
            rest.append(TextPiece(rendered[nbytes:].decode("utf-8", "surrogatepass")))
            nbytes = 0
    return rest

"""What stands before the memory in a llama.cpp file: token ids, and in old session files the last outputs.

llama-server packs its tokens into the list of ids: i32 -1, u32 1, u32 num_tokens, i32 tokens, u32 num_media,
u32 starts[num_media], of each medium u32 nbytes and its bytes; filled up with zeros to whole words.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.errors import UnknownVersion
from serialization.foreign.cursor import Bytes, Cursor, Floats, Words

#: the first word of a packed list, and the version of what follows
PACKED = -1
PACKED_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecord:
    """int32 `words` as they are stored; int32 `ids` of the tokens in them, None where media stand among
    them."""

    words: Words
    ids: Words | None
    num_media: int = 0

    @property
    def packed(self) -> bool:
        return len(self.words) > 0 and int(self.words[0]) == PACKED


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Last logits and embeddings of a context: `places` int32 [outputs] in its batch, `logits` float32
    [outputs * vocabulary] and `embeddings` float32 [outputs * width], both empty where there were none."""

    places: Words
    logits: Floats
    embeddings: Floats


def read_tokens(cursor: Cursor, vocab_size: int) -> TokenRecord:
    """A u32 count and i32 words. Raises `Corrupt` for ids that the vocabulary does not have."""
    num_words = cursor.count("tokens", 4)
    start = cursor.at
    words = cursor.words(num_words, "tokens")
    if num_words and int(words[0]) == PACKED:
        return _unpacked(cursor, start, words, vocab_size)
    _check(cursor, start, words, vocab_size)
    return TokenRecord(words, words)


def record_of(tokens: tuple[int, ...], packed: bool) -> TokenRecord:
    """A record that holds these tokens, as a plain list or as llama-server packs them."""
    ids = np.array(tokens, "<i4")
    head, end = np.array([PACKED, PACKED_VERSION, len(tokens)], "<i4"), np.zeros(1, "<i4")
    return TokenRecord(np.concatenate([head, ids, end]) if packed else ids, ids)


def write_tokens(record: TokenRecord) -> Iterator[Bytes]:
    """What `read_tokens` reads."""
    yield struct.pack("<I", len(record.words))
    yield record.words.tobytes()


def read_outputs(cursor: Cursor, vocab_size: int) -> Outputs:
    """u32 count and i32 places, u64 count and f32 logits, u64 count and f32 embeddings. Raises `Corrupt`."""
    places = cursor.words(cursor.count("outputs", 4), "places of outputs")
    at = cursor.at
    num_logits = cursor.u64("the number of logits")
    if num_logits not in (0, len(places) * vocab_size):
        raise cursor.corrupt(f"{num_logits} logits of {len(places)} outputs over {vocab_size} tokens", at)
    logits = cursor.floats(num_logits, "logits")
    at = cursor.at
    num_values = cursor.u64("the number of values of embeddings")
    if num_values % max(len(places), 1) or (num_values and not len(places)):
        raise cursor.corrupt(f"{num_values} values of embeddings of {len(places)} outputs", at)
    return Outputs(places, logits, cursor.floats(num_values, "embeddings"))


def write_outputs(outputs: Outputs) -> Iterator[Bytes]:
    """What `read_outputs` reads."""
    yield struct.pack("<I", len(outputs.places))
    yield outputs.places.tobytes()
    for values in (outputs.logits, outputs.embeddings):
        yield struct.pack("<Q", len(values))
        yield values.tobytes()


def _check(cursor: Cursor, start: int, tokens: Words, vocab_size: int) -> None:
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(bad):
        first = int(bad[0])
        raise cursor.corrupt(
            f"token {int(tokens[first])}, where the model knows {vocab_size}", start + 4 * first
        )


def _unpacked(cursor: Cursor, start: int, words: Words, vocab_size: int) -> TokenRecord:
    inner = Cursor(cursor.data[: cursor.at], start + 4)
    if (version := inner.u32("the version of a packed list")) != PACKED_VERSION:
        raise UnknownVersion(
            f"at byte {start + 4}: tokens packed by version {version}; known is {PACKED_VERSION}",
            version=version,
        )
    num_tokens = inner.count("packed tokens", 4)
    tokens_at = inner.at
    tokens = inner.words(num_tokens, "packed tokens")
    num_media = inner.count("media", 8)
    starts = inner.words(num_media, "starts of media")
    if len(starts) and not 0 <= starts.min() <= starts.max() < num_tokens:
        raise inner.corrupt("a medium that starts behind the last token")
    for _ in range(num_media):
        inner.take(inner.count("bytes of a medium", 1), "a medium")
    if inner.left > 3 or bytes(inner.take(inner.left, "padding")).strip(b"\0"):
        raise inner.corrupt("packed tokens that do not end where their list does")
    if num_media:
        _check(inner, tokens_at, np.maximum(tokens, 0), vocab_size)  # negative inside of media
        return TokenRecord(words, None, num_media)
    _check(inner, tokens_at, tokens, vocab_size)
    return TokenRecord(words, tokens)

"""Which tokens of a vocabulary may come next in a JSON object.

Most tokens are judged by the state alone, once for each: all of the vocabulary together, a byte at a time.
The others close a bracket that was open before them, or begin what follows a comma there: they are read again
for the brackets that are open.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.chooser import Mask
from engine.grammar.json_bytes import BLANKS, CODES, MAX_DEPTH, NUM_STATES, Do, Place, State, read
from engine.tokenizer import Tokenizer

#: Masks that are kept, of places that were met last.
_KEPT = 128

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """On all tokens in one state. `good` may come whatever is open, but for the room that their own brackets
    need, `deepest`; on those of `asking` the open brackets decide."""

    good: Mask
    deepest: npt.NDArray[np.int8]
    asking: tuple[int, ...]


class JsonMasks:
    """Of one tokenizer. Used by one thread at a time once it is made, which takes seconds for a large
    vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
        ends = np.zeros(tokenizer.vocab_size, np.bool_)
        ends[[each for each in tokenizer.end_ids if each < len(ends)]] = True
        self._ends = ends
        self._lengths = np.array([len(each) for each in self._bytes], np.int64)
        self._offsets = np.cumsum(self._lengths) - self._lengths
        self._flat = np.frombuffer(b"".join(self._bytes), np.uint8)
        self._verdicts = tuple(self._judge(state) for state in range(NUM_STATES))
        self._kept: OrderedDict[Place, Mask] = OrderedDict()
        #: tokens that do not begin with a blank
        self.solid = np.array([each[:1] not in BLANKS for each in self._bytes], np.bool_)

    def bytes_of(self, token: int) -> bytes:
        return self._bytes[token]

    def mask(self, place: Place) -> Mask:
        """Which tokens may follow at `place`: behind the object those that end a reply. Read only."""
        if place.state == State.END:
            return self._ends
        found = self._kept.get(place)
        if found is None:
            found = self._kept[place] = self._make(place)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return found

    def _make(self, place: Place) -> Mask:
        verdict = self._verdicts[place.state]
        mask = verdict.good & (verdict.deepest <= MAX_DEPTH - len(place.open))
        for token in verdict.asking:
            mask[token] = read(place, self._bytes[token]) is not None
        return mask

    def _judge(self, state: int) -> Verdict:
        good = np.zeros(len(self._bytes), np.bool_)
        deepest = np.zeros(len(self._bytes), np.int8)
        asking: list[int] = []
        ids = np.flatnonzero(self._lengths)
        states = np.full(len(ids), state, np.int64)
        # Brackets that the token itself opened: how many, and a bit for each, 1 for [, the innermost lowest.
        depth, kinds = np.zeros_like(ids), np.zeros_like(ids)
        at = 0
        while len(ids):
            codes = CODES[states, self._flat[self._offsets[ids] + at]].astype(np.int64)
            does, states = codes >> 8, codes & 255
            at += 1
            opening = (does == Do.OPEN_OBJECT) | (does == Do.OPEN_ARRAY)
            kinds = np.where(opening, kinds << 1 | (does == Do.OPEN_ARRAY), kinds)
            depth = depth + opening
            deepest[ids] = np.maximum(deepest[ids], depth)
            inner = kinds & 1
            asks = (does >= Do.CLOSE_OBJECT) & (depth == 0)
            closing = ((does == Do.CLOSE_OBJECT) & (inner == 0)) | ((does == Do.CLOSE_ARRAY) & (inner == 1))
            comma = does == Do.COMMA
            states = np.where(comma, np.where(inner == 1, int(State.VALUE), int(State.KEY)), states)
            depth = depth - closing
            kinds = np.where(closing, kinds >> 1, kinds)
            # Before the object nothing is open, so that one that is closed within a token was the whole.
            whole = closing & (depth == 0) & (state == State.START)
            states = np.where(whole, int(State.END), states)
            asking += ids[asks].tolist()
            alive = (codes >= 0) & ~asks & (depth <= MAX_DEPTH) & ((does < Do.CLOSE_OBJECT) | comma | closing)
            over = self._lengths[ids] == at
            good[ids[alive & over]] = True
            left = alive & ~over
            ids, states, depth, kinds = ids[left], states[left], depth[left], kinds[left]
        return Verdict(good, deepest, tuple(asking))

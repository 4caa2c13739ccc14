"""Hashes of n-grams, against one token at a time."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from engine.cache.memory import NULL_TOKEN
from engine.models.ngram import NgramHash, build_hash, multipliers_of, primes_from

END = 2
HASH = build_hash(index=1, longest=4, heads=3, base=50, vocab_size=100, seed=7, end=END)


def rows_of(ngrams: NgramHash, text: list[int]) -> list[int]:
    """Of the last token of `text`."""
    line = [text[-1]]
    for token in reversed(text[:-1]):
        line.append(END if END in line[1:] or token == NULL_TOKEN else token)
    line += [END] * ngrams.num_before
    rows = []
    for length, heads in enumerate(zip(ngrams.sizes, ngrams.offsets, strict=True), start=2):
        mixed = 0
        for token, multiplier in zip(line[:length], ngrams.multipliers, strict=False):
            mixed ^= token * int(multiplier)
        rows += [mixed % int(size) + int(offset) for size, offset in zip(*heads, strict=True)]
    return rows


@given(st.lists(st.sampled_from([NULL_TOKEN, END, 3, 4, 99]), min_size=4, max_size=12))
def test_nothing_before_the_end_of_a_text_is_taken_in(text: list[int]) -> None:
    tokens = [END if token == NULL_TOKEN else token for token in text]
    padded = [NULL_TOKEN] * HASH.num_before + text
    before = np.array([padded[at : at + HASH.num_before] for at in range(len(text))])
    rows = HASH(np.array(tokens), before)
    for at in range(len(text)):
        assert rows[at].tolist() == rows_of(HASH, [*text[:at], tokens[at]])


def test_heads_have_primes_of_their_own_one_behind_the_other() -> None:
    layers = [build_hash(index, 3, 2, 50, 100, 7, END) for index in range(2)]
    assert [size for layer in layers for size in layer.sizes.reshape(-1)] == primes_from(50, 8)
    assert primes_from(50, 8) == [53, 59, 61, 67, 71, 73, 79, 83]
    assert primes_from(0, 4) == [2, 3, 5, 7]
    for layer in layers:
        assert list(layer.offsets.reshape(-1)) == [0, *itertools.accumulate(layer.sizes.reshape(-1)[:-1])]
        assert layer.num_rows == layer.sizes.sum()


def test_products_with_multipliers_fit_into_an_int64() -> None:
    for vocab_size in (1, 300, 248_320):
        multipliers = multipliers_of(1234, 5, vocab_size)
        assert all(multiplier % 2 for multiplier in multipliers)
        assert max(multipliers) * (vocab_size - 1) < 2**63
        assert len(set(multipliers)) == 5

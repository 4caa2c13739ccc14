"""Guesses by what followed the same tokens before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculative.ngram import LENGTHS, NgramDrafter
from engine.state import SamplerParams, SeqId


def propose(tokens: list[int], count: int = 4) -> list[int]:
    return list(NgramDrafter().propose(SeqId(0), tokens, SamplerParams(), count))


def slow(tokens: list[int], count: int) -> list[int]:
    """The same, spelled out."""
    for length in LENGTHS:
        tail = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(tail) == length and tokens[start : start + length] == tail:
                line = list(tokens)
                guesses = []
                at = start + length
                while len(guesses) < count:
                    guesses.append(line[at])
                    line.append(line[at])
                    at += 1
                return guesses
    return []


def test_what_followed_the_last_time_is_guessed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9, 1]


def test_a_longer_run_counts_more_than_a_later_one() -> None:
    assert propose([1, 2, 3, 4, 7, 2, 3, 5, 1, 2, 3], 1) == [4]


def test_of_runs_of_one_length_the_last_counts() -> None:
    assert propose([2, 3, 4, 2, 3, 5, 2, 3], 1) == [5]


def test_where_the_tokens_end_a_repetition_goes_on() -> None:
    assert propose([7, 8, 7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_is_guessed_of_what_was_never_said(tokens: list[int]) -> None:
    assert propose(tokens) == []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_it_is_the_plain_search(tokens: list[int], count: int) -> None:
    assert propose(tokens, count) == slow(tokens, count)

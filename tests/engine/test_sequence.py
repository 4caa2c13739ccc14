"""A record's ids and spans tell the same story, whatever is done to it."""

from __future__ import annotations

import pytest
import torch

from engine.sequence import Record, joined, spans_below
from engine.state import NextLogits, Pending, Provenance, SamplerParams, Span

COMPUTED, SHIFTED = Provenance.COMPUTED, Provenance.SHIFTED
LOGITS = torch.zeros(3)


def record(count: int) -> Record:
    made = Record(SamplerParams())
    made.append(range(count))
    made.follow(LOGITS[None])
    return made


def test_appending_makes_one_span() -> None:
    made = record(5)
    made.append([7, 8])
    assert made.tokens == [0, 1, 2, 3, 4, 7, 8]
    assert made.spans == (Span(0, 7, COMPUTED),)


def test_what_followed_the_cut_is_pending() -> None:
    made = record(5)
    made.cut(3)
    assert made.tokens == [0, 1, 2]
    assert made.spans == (Span(0, 3, COMPUTED),)
    assert made.edge == Pending(3)
    assert made.logits is None


def test_nothing_follows_an_empty_record() -> None:
    made = record(5)
    made.cut(0)
    assert (made.tokens, made.spans, made.edge) == ([], (), None)


def test_rows_behind_a_drop_are_shifted_and_logits_are_of_before() -> None:
    made = record(10)
    made.drop(2, 6)
    assert made.tokens == [0, 1, 6, 7, 8, 9]
    assert made.spans == (Span(0, 2, COMPUTED), Span(2, 6, SHIFTED))
    assert made.logits is None
    assert isinstance(made.edge, NextLogits)


def test_what_comes_after_a_shift_is_computed_again() -> None:
    made = record(10)
    made.drop(0, 5)
    made.append([1])
    assert made.spans == (Span(0, 5, SHIFTED), Span(5, 6, COMPUTED))
    made.drop(1, 3)
    assert made.spans == (Span(0, 4, SHIFTED),)


def test_a_fork_is_its_own() -> None:
    made = record(4)
    fork = made.fork()
    fork.append([9])
    fork.cut(2)
    assert made.tokens == [0, 1, 2, 3]
    assert made.spans == (Span(0, 4, COMPUTED),)


@pytest.mark.parametrize(
    ("tokens", "length"),
    [((), 0), ((0,), 1), ((0, 1, 2), 3), ((0, 1, 9), 2), ((9, 1, 2), 0), ((0, 1, 2, 3, 4, 5), 4)],
)
def test_equal_leading_ids_are_shareable(tokens: tuple[int, ...], length: int) -> None:
    assert record(4).shareable(tokens) == length


def test_shifted_rows_are_not_shareable() -> None:
    made = record(10)
    made.drop(3, 5)
    assert made.shareable([0, 1, 2, 5, 6, 7]) == 3


def test_spans_are_cut_and_joined() -> None:
    spans = (Span(0, 3, COMPUTED), Span(3, 3, SHIFTED), Span(3, 5, COMPUTED), Span(5, 8, SHIFTED))
    assert joined(spans) == (Span(0, 5, COMPUTED), Span(5, 8, SHIFTED))
    assert spans_below(joined(spans), 6) == (Span(0, 5, COMPUTED), Span(5, 6, SHIFTED))
    assert spans_below(joined(spans), 5) == (Span(0, 5, COMPUTED),)

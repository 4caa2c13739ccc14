"""Batches are cut without losing, doubling or reordering a token of any sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import NUM_PLACES, Batch, counts_of, split_equal, split_placed, split_simple
from engine.errors import ConfigError

SPLITS = [split_simple, split_equal]
#: the sequence of every row, in any mixture
ROWS = st.lists(st.integers(0, 4), min_size=1, max_size=40)


def batch_of(seqs: list[int]) -> Batch:
    """Rows whose tokens number them; positions go on within each sequence."""
    rows = np.asarray(seqs, np.int64)
    positions = np.array([seqs[:i].count(seq) for i, seq in enumerate(seqs)], np.int64)
    return Batch(np.arange(len(rows)), positions, rows, np.ones(len(rows), np.bool_))


@pytest.mark.parametrize("split", [*SPLITS, split_placed])
@given(seqs=ROWS, max_ubatch=st.integers(1, 12))
def test_every_row_is_computed_once_and_in_the_order_of_its_sequence(split, seqs, max_ubatch) -> None:  # type: ignore[no-untyped-def]
    batch = batch_of(seqs)
    ubatches = split(batch, max_ubatch)
    rows = np.concatenate([ubatch.rows for ubatch in ubatches])
    assert sorted(rows.tolist()) == list(range(len(batch)))
    for seq in set(seqs):
        own = rows[batch.seqs[rows] == seq]
        assert batch.positions[own].tolist() == list(range(len(own)))
    for ubatch in ubatches:
        assert 0 < len(ubatch) <= max_ubatch
        assert ubatch.tokens.tolist() == ubatch.rows.tolist()
        assert ubatch.positions.tolist() == batch.positions[ubatch.rows].tolist()


@pytest.mark.parametrize("split", SPLITS)
@given(seqs=ROWS, max_ubatch=st.integers(1, 12))
def test_segments_cover_a_ubatch_with_runs_of_one_sequence(split, seqs, max_ubatch) -> None:  # type: ignore[no-untyped-def]
    batch = batch_of(seqs)
    for ubatch in split(batch, max_ubatch):
        at, before = 0, None
        for segment in ubatch.segments:
            assert segment.start == at
            assert segment.stop > at
            assert segment.seq != before
            rows = ubatch.rows[segment.start : segment.stop]
            assert set(batch.seqs[rows].tolist()) == {segment.seq}
            assert np.diff(batch.positions[rows]).tolist() == [1] * (len(rows) - 1)
            at, before = segment.stop, segment.seq
        assert at == len(ubatch)


@given(seqs=ROWS, max_ubatch=st.integers(1, 12))
def test_simple_cuts_are_full_and_in_the_order_of_the_batch(seqs: list[int], max_ubatch: int) -> None:
    ubatches = split_simple(batch_of(seqs), max_ubatch)
    assert np.concatenate([ubatch.rows for ubatch in ubatches]).tolist() == list(range(len(seqs)))
    assert all(len(ubatch) == max_ubatch for ubatch in ubatches[:-1])


@given(seqs=ROWS, max_ubatch=st.integers(1, 12))
def test_equal_cuts_have_as_many_rows_of_each_sequence(seqs: list[int], max_ubatch: int) -> None:
    for ubatch in split_equal(batch_of(seqs), max_ubatch):
        lengths = {segment.stop - segment.start for segment in ubatch.segments}
        assert len(lengths) == 1
        owners = [segment.seq for segment in ubatch.segments]
        assert len(set(owners)) == len(owners)


@given(seqs=st.lists(st.integers(0, 9), min_size=1, max_size=60), data=st.data())
def test_the_last_rows_of_a_sequence_are_computed_together(seqs: list[int], data: st.DataObject) -> None:
    max_ubatch = data.draw(st.integers(1, 8))
    n_keep_tail = data.draw(st.integers(0, max_ubatch))
    batch = batch_of(seqs)
    ubatches = split_equal(batch, max_ubatch, n_keep_tail)
    assert sorted(np.concatenate([ubatch.rows for ubatch in ubatches]).tolist()) == list(range(len(batch)))
    assert all(0 < len(ubatch) <= max_ubatch for ubatch in ubatches)
    for ubatch in ubatches:
        assert len({segment.stop - segment.start for segment in ubatch.segments}) == 1
        assert len({segment.seq for segment in ubatch.segments}) == len(ubatch.segments)
    for seq in set(seqs):
        own = np.flatnonzero(batch.seqs == seq)
        tail = set(own[len(own) - min(n_keep_tail, len(own)) :].tolist())
        assert not tail or any(tail <= set(ubatch.rows.tolist()) for ubatch in ubatches)
        rows = np.concatenate([ubatch.rows[np.isin(ubatch.rows, own)] for ubatch in ubatches])
        assert rows.tolist() == own.tolist()


def test_more_sequences_than_rows_in_a_pass_take_turns() -> None:
    batch = batch_of([seq for _ in range(3) for seq in range(7)])
    for n_keep_tail in range(4):
        ubatches = split_equal(batch, 4, n_keep_tail)
        assert max(len(ubatch) for ubatch in ubatches) <= 4
        assert sum(len(ubatch) for ubatch in ubatches) == 21


def test_a_tail_goes_before_the_lockstep() -> None:
    def cuts(seqs: list[int], max_ubatch: int, n_keep_tail: int) -> list[list[tuple[int, int]]]:
        ubatches = split_equal(batch_of(seqs), max_ubatch, n_keep_tail)
        return [[(s.seq, s.stop - s.start) for s in ubatch.segments] for ubatch in ubatches]

    # A step of 3 would leave the first sequence one row, where three belong together.
    assert cuts([0] * 4 + [1] * 3, 8, 3) == [[(1, 3)], [(0, 4)]]
    assert cuts([0] * 10, 8, 3) == [[(0, 7)], [(0, 3)]]
    assert cuts([0] * 10, 8, 0) == [[(0, 8)], [(0, 2)]]
    assert cuts([0] * 5 + [1] * 5, 4, 4) == [[(0, 1)], [(0, 4)], [(1, 1)], [(1, 4)]]


def test_a_tail_must_fit_into_a_pass() -> None:
    with pytest.raises(ConfigError, match="keep_tail = 5: an ubatch has 4"):
        split_equal(batch_of([0] * 9), 4, 5)


def test_equal_cuts_go_on_until_the_first_sequence_ends() -> None:
    batch = batch_of([0] * 7 + [1] * 3 + [2] * 5)
    segments = [
        [(segment.seq, segment.stop - segment.start) for segment in ubatch.segments]
        for ubatch in split_equal(batch, 9)
    ]
    assert segments == [[(0, 3), (1, 3), (2, 3)], [(0, 2), (2, 2)], [(0, 2)]]


def test_outputs_follow_their_rows() -> None:
    batch = batch_of([0, 1, 0, 1, 0])
    batch = Batch(batch.tokens, batch.positions, batch.seqs, np.array([False, False, False, True, True]))
    found = [ubatch.outputs.tolist() for ubatch in split_equal(batch, 4)]
    assert found == [[False, False, False, True], [True]]


def test_sequences_are_counted_in_the_order_in_which_they_appear() -> None:
    assert counts_of(batch_of([3, 1, 3, 3, 0])) == [(3, 3), (1, 1), (0, 1)]


@given(seqs=ROWS, starts=st.lists(st.integers(0, 30), min_size=5, max_size=5), max_ubatch=st.integers(1, 12))
def test_a_token_has_the_place_of_its_position_for_itself(
    seqs: list[int], starts: list[int], max_ubatch: int
) -> None:
    batch = batch_of(seqs)
    batch = replace(batch, positions=batch.positions + np.asarray(starts)[batch.seqs])
    ubatches = split_placed(batch, max_ubatch)
    for ubatch in ubatches:
        assert ubatch.places is not None
        assert ubatch.places.tolist() == (ubatch.positions % NUM_PLACES).tolist()
        assert len(set(ubatch.places.tolist())) == len(ubatch)
        assert [(one.seq, one.start, one.stop) for one in ubatch.segments] == [
            (seq, at, at + 1) for at, seq in enumerate(batch.seqs[ubatch.rows])
        ]


@given(start=st.integers(0, 30), count=st.integers(1, 40))
def test_a_run_is_cut_into_as_few_passes_as_its_length_needs(start: int, count: int) -> None:
    batch = batch_of([0] * count)
    ubatches = split_placed(replace(batch, positions=batch.positions + start), 64)
    assert len(ubatches) == -(-count // NUM_PLACES)


def test_sequences_share_passes_where_their_places_are_free() -> None:
    batch = replace(batch_of([0, 1, 1, 2]), positions=np.array([3, 8, 9, 11]))
    assert [ubatch.rows.tolist() for ubatch in split_placed(batch, 64)] == [[0, 1, 2], [3]]

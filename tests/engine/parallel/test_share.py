"""What each rank has of a model: everything once, whole heads, and columns in runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.share import UNIT, Share

counts, sizes = st.integers(1, 5000), st.integers(1, 16)


def joined(parts: list[range]) -> list[int]:
    return [index for part in parts for index in part]


@given(counts, sizes)
def test_every_thing_is_some_ranks_and_no_others(count: int, size: int) -> None:
    parts = [Share(rank, size).of(count) for rank in range(size)]
    assert joined(parts) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(counts, sizes)
def test_columns_are_shared_in_runs_as_long_as_all_ranks_get_some(count: int, size: int) -> None:
    parts = [Share(rank, size).columns(count) for rank in range(size)]
    assert joined(parts) == list(range(count))
    if count % UNIT == 0 and count // UNIT >= size:
        assert all(len(part) % UNIT == 0 for part in parts)
    if count >= size:
        assert all(parts)


@given(st.integers(1, 64), st.integers(1, 8), sizes)
def test_query_heads_are_with_the_heads_that_they_read(kv_heads: int, group: int, size: int) -> None:
    shares = [Share(rank, size).heads(kv_heads * group, kv_heads) for rank in range(size)]
    assert joined([share.kv for share in shares]) == list(range(kv_heads))
    for share in shares:
        assert {head // group for head in share.q} == set(share.kv)
        assert len(share.q) == group * len(share.kv)


@pytest.mark.parametrize(("size", "expected"), [(2, [1, 2]), (3, [1, 1, 1]), (4, [0, 1, 1, 1])])
def test_three_heads_among_ranks(size: int, expected: list[int]) -> None:
    """Rank 0, which has the output matrix too, is the one with less."""
    assert [len(Share(rank, size).heads(9, 3).kv) for rank in range(size)] == expected


def test_rows_of_q_k_and_v_in_one_matrix() -> None:
    """Four heads over two, of 8 values (v: 4): the second rank's are behind the first's in each."""
    q, k, v = Share(1, 2).heads(4, 2).joined(8, 4)
    assert (q, k, v) == (slice(16, 32), slice(40, 48), slice(52, 56))


def test_the_output_matrix_is_rank_0s() -> None:
    assert [len(Share(rank, 3).ends(1000)) for rank in range(3)] == [1000, 0, 0]

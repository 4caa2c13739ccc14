"""The choice of sparse attention against its definition: scores one by one, a sort with a defined order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache import dsa
from engine.cache.dsa import best, choose, lightning_scores
from engine.cache.quant import Hadamard

CPU = torch.device("cpu")


def drawn(queries: int, heads: int, size: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads, size), (queries, heads), (rows, size))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_scores_are_weighted_sums_of_what_is_positive() -> None:
    q, weights, keys = drawn(5, 3, 8, 11)
    scores = lightning_scores(q, weights, keys)
    for t in range(5):
        for s in range(11):
            expected = sum(float(weights[t, h]) * max(0.0, float(q[t, h] @ keys[s])) for h in range(3))
            assert float(scores[t, s]) == pytest.approx(expected, abs=1e-5)


def test_scores_in_the_rotated_basis_are_the_same() -> None:
    q, weights, keys = drawn(5, 3, 16, 11)
    hadamard = Hadamard(16, CPU)
    rotated = lightning_scores(hadamard.rotate(q), weights, hadamard.rotate(keys))
    torch.testing.assert_close(rotated, lightning_scores(q, weights, keys), atol=1e-4, rtol=0)


@given(data=st.data(), rows=st.integers(1, 9), count=st.integers(1, 10), queries=st.integers(1, 3))
def test_best_is_a_sort_in_which_of_equals_the_lowest_position_comes_first(
    data: st.DataObject, rows: int, count: int, queries: int
) -> None:
    # Few different scores, so that ties across the edge are the rule.
    row = st.lists(st.sampled_from([-1.5, 0.0, -0.0, 0.25, 2.0]), min_size=rows, max_size=rows)
    scores = data.draw(st.lists(row, min_size=queries, max_size=queries))
    sees = st.lists(st.booleans(), min_size=rows, max_size=rows)
    visible = data.draw(st.lists(sees, min_size=queries, max_size=queries))
    chosen = best(torch.tensor(scores), torch.tensor(visible), count)
    for line, seen, got in zip(scores, visible, chosen.tolist(), strict=True):
        order = sorted((s for s in range(rows) if seen[s]), key=lambda s, line=line: (-line[s], s))
        assert {s for s in range(rows) if got[s]} == set(order[:count])


def test_a_query_chooses_among_what_is_not_behind_it_in_time() -> None:
    q, weights, keys = drawn(6, 4, 8, 20)
    at, rows_at = np.arange(14, 20), np.arange(20)
    chosen = choose(q, weights, keys, at, rows_at, 5)
    assert chosen.sum(1).tolist() == [5] * 6
    for t in range(6):
        scores = lightning_scores(q[t : t + 1], weights[t : t + 1], keys[: 15 + t])[0]
        assert set(chosen[t].nonzero()[:, 0].tolist()) == set(scores.topk(5).indices.tolist())


def test_a_query_that_sees_fewer_rows_than_it_may_choose_takes_them_all() -> None:
    q, weights, keys = drawn(8, 4, 8, 8)
    chosen = choose(q, weights, keys, np.arange(8), np.arange(8), 5)
    assert torch.equal(chosen[:5], torch.ones(8, 8, dtype=torch.bool).tril()[:5])
    assert chosen[5:].sum(1).tolist() == [5] * 3
    assert not chosen.triu(1).any()


@pytest.mark.parametrize("most", [1, 150, 2**24])
def test_memory_bounds_do_not_change_the_choice(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, weights, keys = drawn(10, 16, 8, 30)
    expected = choose(q, weights, keys, np.arange(20, 30), np.arange(30), 7)
    monkeypatch.setattr(dsa, "_MOST_PRODUCTS", most)
    assert torch.equal(choose(q, weights, keys, np.arange(20, 30), np.arange(30), 7), expected)

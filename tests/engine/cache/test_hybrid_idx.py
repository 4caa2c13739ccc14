"""Blocks that close among tokens that come in pieces, and the choice among them, query by query."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from engine.cache.hybrid_idx import QUERIES, block_scores, closing, pick_blocks, rows_of_blocks


@given(st.integers(2, 7), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_every_block_closes_once_and_whole_however_the_tokens_are_cut(block: int, chunks: list[int]) -> None:
    rows = torch.arange(1.0, sum(chunks) + 1)[:, None].expand(-1, 3)
    state, start, closed = torch.zeros((block - 1, 3)), 0, []
    for count in chunks:
        line = torch.cat((state, rows[start : start + count]))
        found, state = closing(line, start, block), line[count:]
        start += count
        assert len(found) == start // block - (start - count) // block
        closed.append(found)
    whole = len(rows) // block * block
    assert torch.equal(torch.cat(closed), rows[:whole].view(-1, block, 3))
    last = rows[-(block - 1) :]
    assert torch.equal(state[-len(last) :], last)


def test_scores_are_sums_over_heads_of_what_is_positive() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((QUERIES + 3, 5, 8), generator=generator)
    keys = torch.randn((6, 8), generator=generator)
    weights = torch.randn((QUERIES + 3, 5), generator=generator)
    scores = block_scores(q, weights, keys)
    for query, block in itertools.product((0, 1, QUERIES - 1, QUERIES, QUERIES + 2), range(6)):
        products = [max(0.0, float(q[query, head] @ keys[block])) for head in range(5)]
        expected = sum(float(w) * p for w, p in zip(weights[query], products, strict=True))
        assert float(scores[query, block]) == pytest.approx(expected, abs=1e-5)


def chosen_of(scores: Sequence[float], position: int, block: int, most: int) -> set[int]:
    """Positions that one query may see, spelled out."""
    closed = [number for number in range(len(scores)) if (number + 1) * block - 1 <= position]
    best = sorted(closed, key=lambda number: (-scores[number], number))[:most]
    seen = {at for number in best for at in range(number * block, (number + 1) * block)}
    return seen | {at for at in range(position + 1) if at >= len(closed) * block}


@given(st.data(), st.integers(2, 5), st.integers(1, 4), st.integers(0, 40), st.integers(1, 12))
def test_a_choice_is_the_best_closed_blocks_and_the_open_one(
    data: st.DataObject, block: int, most: int, start: int, num_queries: int
) -> None:
    """Few different scores, so that many are equal: then the earlier block goes first."""
    end = start + num_queries
    few = st.sampled_from([-2.0, -1.0, 0.0, 1.0])
    lines = st.lists(few, min_size=end // block, max_size=end // block)
    scores = data.draw(st.lists(lines, min_size=num_queries, max_size=num_queries))
    positions = torch.arange(start, end)
    picked = pick_blocks(torch.tensor(scores).view(num_queries, -1), positions, block, most)
    rows = rows_of_blocks(picked, positions, block)
    assert rows.shape == (num_queries, end)
    for query, position in enumerate(range(start, end)):
        seen = set(rows[query].nonzero()[:, 0].tolist())
        assert seen == chosen_of(scores[query], position, block, most)

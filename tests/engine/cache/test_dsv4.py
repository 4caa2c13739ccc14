"""DSV4: rows of blocks, choice and attention, each against a definition in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache.attention import Scoring
from engine.cache.dsv4 import QUERIES, attend_both, choose, closed_at, closing, pooled, pooled_overlapping
from engine.cache.memory import Held, WindowSpec

SIZE = 6
CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def row_by_definition(lines: torch.Tensor, block: int, bias: torch.Tensor, overlapping: bool) -> torch.Tensor:
    """One token after the other, in float64. `lines` are all from position 0 on."""
    ratio = len(bias)
    u, z = [], []
    for position in range((block - overlapping) * ratio, (block + 1) * ratio):
        if position >= 0:
            values = slice(None)
            if overlapping:
                values = slice(SIZE) if position < block * ratio else slice(SIZE, None)
            u.append(lines[position, 0, values].double())
            z.append((lines[position, 1] + bias[position % ratio])[values].double())
    weights = torch.stack(z).exp()
    return (weights / weights.sum(0) * torch.stack(u)).sum(0)


@pytest.mark.parametrize("ratio", [1, 2, 4, 7])
@pytest.mark.parametrize("overlapping", [False, True], ids=["heavy", "sparse"])
@pytest.mark.parametrize("counts", [(41,), (1,) * 41, (13, 1, 1, 9, 2, 15), (3, 38)], ids=str)
def test_rows_are_the_same_however_tokens_come(
    ratio: int, overlapping: bool, counts: tuple[int, ...]
) -> None:
    width = 2 * SIZE if overlapping else SIZE
    lines, bias = drawn(41, 2, width), drawn(ratio, width, seed=1)
    pool = pooled_overlapping if overlapping else pooled
    num_kept = 2 * ratio if overlapping else ratio
    ring, first, rows = torch.zeros(num_kept, 2, width), 0, []
    for count in counts:
        known = torch.cat((ring, lines[first : first + count]))
        some = pool(known, first, bias)
        assert len(some) == len(closing(first, count, ratio))
        rows.append(some)
        ring, first = known[-num_kept:], first + count
    expected = [row_by_definition(lines, block, bias, overlapping) for block in range(41 // ratio)]
    assert torch.allclose(torch.cat(rows).double(), torch.stack(expected), atol=1e-6)


@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_who_ends_a_block_sees_it_at_once(ratio: int) -> None:
    positions = np.arange(5, 40)
    closed = closed_at(positions, ratio, CPU)
    for row, position in zip(closed, positions.tolist(), strict=True):
        ends = [block for block in range(40 // ratio) if (block + 1) * ratio - 1 <= position]
        assert row.nonzero()[:, 0].tolist() == ends


def test_the_best_blocks_are_chosen_and_of_equal_ones_the_first() -> None:
    generator = torch.Generator().manual_seed(2)
    num_queries, num_blocks, count = QUERIES + 5, 12, 3
    # Small whole numbers: sums are exact, and ReLU makes many zeros.
    q = torch.randint(-1, 2, (num_queries, 2, 4), generator=generator).float()
    keys = torch.randint(-1, 2, (num_blocks, 4), generator=generator).float()
    weights = torch.randint(-2, 3, (num_queries, 2), generator=generator).float()
    closed = torch.arange(num_blocks) < torch.arange(num_queries)[:, None]
    picked = choose(q, weights, keys, closed, count)
    for query in range(num_queries):
        scores = {
            block: sum(
                float(weights[query, head]) * max(0.0, float(q[query, head] @ keys[block]))
                for head in range(2)
            )
            for block in range(min(query, num_blocks))
        }
        expected = sorted(scores, key=lambda block: (-scores[block], block))[:count]
        assert picked[query].nonzero()[:, 0].tolist() == sorted(expected)


@pytest.mark.parametrize("num_queries", [1, 9, 2 * QUERIES + 3])
def test_window_and_blocks_share_one_softmax_with_the_sinks(num_queries: int) -> None:
    heads, window = 3, WindowSpec(5)
    at = np.arange(20, 20 + num_queries)
    # A window's rows begin where the first query's does, or before.
    near = Held(drawn(num_queries + 6, 1, SIZE), np.arange(14, 20 + num_queries))
    far, q, sinks = drawn(4, SIZE, seed=1), drawn(num_queries, heads, SIZE, seed=2), drawn(heads, seed=3)
    picked = drawn(num_queries, 4, seed=4) > 0
    out = attend_both(q, at, near, window, far, picked, Scoring(0.3, sinks=sinks))
    for query in range(num_queries):
        seen = [
            row
            for row, position in zip(near.rows[:, 0], near.positions, strict=True)
            if 0 <= at[query] - position < 5
        ]
        seen += [row for row, is_picked in zip(far, picked[query], strict=True) if is_picked]
        rows = torch.stack(seen).double()
        for head in range(heads):
            weights = (0.3 * rows @ q[query, head].double()).exp()
            expected = weights @ rows / (weights.sum() + sinks[head].double().exp())
            assert torch.allclose(out[query, head].double(), expected, atol=1e-6)

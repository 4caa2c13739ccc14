"""The laws of kind "dsa": which rows a query of sparse attention reads (DeepSeek-V3.2-Exp technical report,
section 2.1).

A light indexer scores every row that a query may see, and the query attends to the best of them. Scores are
float32 whatever the model computes in. ReLU makes exact zeros, so scores can be equal; of equal ones the
lowest positions win. This makes the choice a function of the scores alone, not of how a sort goes about it.
"""

from __future__ import annotations

import torch

from engine.batch import Ints

#: Products of one step, query by query head by row. It bounds memory, and says nothing about the results.
_MOST_PRODUCTS = 2**24


def lightning_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The score of row s for query t: sum over heads h of weights[t, h] * max(0, q[t, h] . keys[s]).

    q [queries, heads, size], weights [queries, heads], keys [rows, size], all float32 and q and keys in one
    basis. Returns float32 [queries, rows].
    """
    products = torch.matmul(q, keys.t()).relu_()
    return torch.bmm(weights[:, None], products)[:, 0]


def best(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """Of each query's `visible` rows the `count` with the highest scores, the lowest positions among equals;
    all where there are no more. `scores` and `visible` are [queries, rows], rows in the order of positions.
    Returns bool [queries, rows]."""
    if count >= scores.shape[1]:
        return visible
    seen = scores.masked_fill(~visible, float("-inf"))
    last = seen.topk(count, -1).values[:, -1:]
    above = seen > last
    equal = seen == last
    room = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & visible


def choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    queries_at: Ints,
    keys_at: Ints,
    count: int,
) -> torch.Tensor:
    """`best` by `lightning_scores` of the rows that are not behind a query in time.

    `queries_at` and `keys_at` are positions, of q and of keys in order. Returns bool [queries, rows].
    """
    visible = torch.from_numpy(keys_at[None] <= queries_at[:, None]).to(q.device)
    if count >= len(keys):
        return visible
    step = max(1, _MOST_PRODUCTS // (q.shape[1] * len(keys)))
    parts = (slice(start, start + step) for start in range(0, len(q), step))
    chosen = [best(lightning_scores(q[part], weights[part], keys), visible[part], count) for part in parts]
    return torch.cat(chosen)

"""DSV4, the compressed attention of DeepSeek-V4: how tokens become block rows, and which rows a query reads.

A query reads the last tokens one by one, and what lies further back in blocks of `ratio` tokens, one row
each. A block's row is a weighted mean of the lines u of its tokens; the weights are a softmax over the tokens
for every value apart, of their lines z and a learned bias for the place in the block. Heavy compression (HCA)
does that over a block's own tokens. Sparse compression (CSA), whose rows an indexer chooses, has lines of
twice the width: the first half counts in the row of the block *after* the token's, the second half in its
own.

Lines are float32 [tokens, 2, width], u and then z, as projected: no norm, no position, no bias. Those that
the next block to close will need are point state, oldest first: `ratio` of them, or two blocks of them for
CSA. Norm and RoPE come after the mean, at the position of the block's first token."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import Ints
from engine.cache.attention import Scoring, attend, narrowed
from engine.cache.dsa import best, lightning_scores
from engine.cache.memory import Held, WindowSpec

#: Rows of blocks, [size] each; point state with the lines that wait for their blocks to close.
SPARSE_KEYS, HEAVY_KEYS, INDEX_KEYS = "csa.k", "hca.k", "lid.k"
SPARSE_RING, HEAVY_RING, INDEX_RING = "csa.ring", "hca.ring", "lid.ring"

#: So many queries are computed at a time; more take memory, not time.
QUERIES = 64


def closing(first: int, count: int, ratio: int) -> range:
    """Numbers of the blocks whose last token is one of the `count` from position `first` on."""
    return range(first // ratio, (first + count) // ratio)


def pooled(lines: torch.Tensor, first: int, bias: torch.Tensor) -> torch.Tensor:
    """[n, width]: rows of the n blocks that close in the tokens from position `first` on.

    `bias` is [ratio, width]. `lines` are those of the last `ratio` tokens before `first`, and those from it.
    """
    ratio = len(bias)
    u, z = _of_blocks(lines, first, ratio, kept=ratio).unbind(2)
    return _mean(u, z + bias)


def pooled_overlapping(lines: torch.Tensor, first: int, bias: torch.Tensor) -> torch.Tensor:
    """`pooled` of lines that are twice as wide as rows, `bias` too: the first halves of a block's own lines
    count in the row of the next block. `lines` begin two blocks before `first`. Block 0 has none before."""
    ratio, size = len(bias), bias.shape[1] // 2
    own = _of_blocks(lines, first, ratio, kept=2 * ratio)
    before = _of_blocks(lines, first, ratio, kept=2 * ratio, back=1)
    u = torch.cat((before[:, :, 0, :size], own[:, :, 0, size:]), 1)
    z = torch.cat((before[:, :, 1, :size] + bias[:, :size], own[:, :, 1, size:] + bias[:, size:]), 1)
    if first < ratio:
        z[:1, :ratio] = float("-inf")
    return _mean(u, z)


def _of_blocks(lines: torch.Tensor, first: int, ratio: int, kept: int, back: int = 0) -> torch.Tensor:
    """[n, ratio, 2, width]: lines of the blocks that close, or of the blocks `back` before each."""
    numbers = closing(first, len(lines) - kept, ratio)
    start = (numbers.start - back) * ratio - first + kept
    return lines[start : start + len(numbers) * ratio].view(len(numbers), ratio, *lines.shape[1:])


def _mean(u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (u * z.softmax(1)).sum(1)


def closed_at(positions: Ints, ratio: int, device: torch.device) -> torch.Tensor:
    """bool [queries, blocks]: which blocks are closed, of those that are for the last of the queries. Who
    ends a block sees it at once."""
    closed = (positions + 1) // ratio
    return torch.from_numpy(np.arange(closed[-1]) < closed[:, None]).to(device)


def choose(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, closed: torch.Tensor, count: int
) -> torch.Tensor:
    """bool [queries, blocks]: the `count` closed blocks with the best lightning scores, of equal ones the
    first.

    q [queries, heads, size] and keys [blocks, size] in one basis, `weights` float32 [queries, heads].
    """
    if keys.shape[0] <= count:
        return closed
    wide = keys.float()
    parts = zip(*(torch.split(x, QUERIES) for x in (q, weights, closed)), strict=True)
    return torch.cat([best(lightning_scores(a.float(), w, wide), seen, count) for a, w, seen in parts])


def attend_both(
    q: torch.Tensor,
    at: Ints,
    near: Held,
    window: WindowSpec,
    far: torch.Tensor,
    picked: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """One softmax over the tokens of the window and the blocks that are picked. Recent tokens are in both.

    q [queries, heads, size], `at` their positions; rows of `near` [n, 1, size] and `far` [blocks, size] are
    keys and values, all in one basis; `picked` is bool [queries, blocks]. Returns [queries, heads, size].
    """
    out = []
    for start in range(0, len(q), QUERIES):
        some = slice(start, start + QUERIES)
        queries = at[some]
        first = int(np.searchsorted(near.positions, window.first_visible(queries[:1])[0]))
        end = int(np.searchsorted(near.positions, queries[-1], side="right"))
        if len(queries) == 1:
            # Nothing is masked, and nothing read but what is picked.
            rows = torch.cat((near.rows[first:end], far[picked[start].nonzero()[:, 0], None]))
            out.append(attend(q[some], rows, rows, None, scoring))
            continue
        keys_at = near.positions[first:end]
        visible = keys_at <= queries[:, None]
        visible &= keys_at >= window.first_visible(queries)[:, None]
        chosen = torch.cat((torch.from_numpy(visible).to(picked.device), picked[some]), 1)
        rows = torch.cat((near.rows[first:end], far[:, None]))
        out.append(narrowed(q[some], rows, rows.shape[-1], None, chosen, scoring))
    return out[0] if len(out) == 1 else torch.cat(out)

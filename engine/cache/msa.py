"""MSA, block-sparse attention of MiniMax-M3: which blocks of tokens a query may see.

A block is `size` consecutive positions, counted from position 0. Its score for a query is the best product
of the query's index vector with the index key of a token in the block that is not behind the query in time;
there is one index vector for each key-value head, and each makes a choice of its own. The `local` blocks
that end with the query's own are taken first, then the best ones, `chosen` in all; of blocks with the same
score the earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.dsa import best

#: So many queries are scored at a time; more take memory, not time.
QUERIES = 128


@dataclass(frozen=True, slots=True)
class BlockLaw:
    """`size` in tokens, the others in blocks; `local` is at most `chosen`."""

    size: int
    chosen: int
    local: int


def choose_tokens(
    q: torch.Tensor, at: torch.Tensor, keys: torch.Tensor, keys_at: torch.Tensor, law: BlockLaw
) -> torch.Tensor:
    """bool [groups, queries, keys]: which keys lie in a block that is chosen; the causal law is not in it.

    q [queries, groups, size] and keys [keys, size] are index vectors in one basis, `at` and `keys_at` their
    positions, rising. There may be holes in `keys_at`.
    """
    blocks = keys_at // law.size
    picked = [
        choose_blocks(score_blocks(some, some_at, keys, keys_at, law), some_at, law)[..., blocks]
        for some, some_at in zip(torch.split(q, QUERIES), torch.split(at, QUERIES), strict=True)
    ]
    return picked[0] if len(picked) == 1 else torch.cat(picked, 1)


def score_blocks(
    q: torch.Tensor, at: torch.Tensor, keys: torch.Tensor, keys_at: torch.Tensor, law: BlockLaw
) -> torch.Tensor:
    """float32 [groups, queries, blocks]; -inf for a block of which a query may see nothing."""
    scores = torch.matmul(q.float().transpose(0, 1), keys.float().T)
    scores = scores.masked_fill(keys_at > at[:, None], float("-inf"))
    num_blocks = int(keys_at[-1]) // law.size + 1
    line = scores.new_full((*scores.shape[:2], num_blocks * law.size), float("-inf"))
    line[..., keys_at] = scores
    return line.view(*scores.shape[:2], num_blocks, law.size).amax(-1)


def choose_blocks(scores: torch.Tensor, at: torch.Tensor, law: BlockLaw) -> torch.Tensor:
    """bool [groups, queries, blocks] of scores of that shape and queries at positions `at`."""
    own = (at // law.size)[:, None]
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    local = (blocks <= own) & (blocks > own - law.local)
    forced = scores.masked_fill(local, float("inf"))
    visible = (blocks <= own).expand_as(scores)
    return best(forced.flatten(0, 1), visible.flatten(0, 1), law.chosen).view_as(scores)

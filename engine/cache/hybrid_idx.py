"""The member that reads sparsely by blocks: keys of an indexer are pooled over every r tokens, queries choose
among the closed blocks and always see the open one.

What a block's key is, is the model's law (`Pool`); it is written once, when the block closes. The rows of the
open block wait as point state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.cache.dsa import best, lightning_scores
from engine.cache.memory import BlocksSpec, Chosen, PartNeed, PointSpec, View
from engine.cache.table import POOLED
from engine.cache.trail import newest_windows

OPEN = "pool.open"  # rows of the block that is not closed

#: (rows [blocks, block, width], the position of each block's first token) -> keys [blocks, size]
Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: So many queries are scored at a time: there is a product for each of their heads and every block.
QUERIES = 128


@dataclass(frozen=True, slots=True)
class PooledIndex:
    """One layer's index over blocks of `block` tokens, at least 2: keys of `size` values, pooled from `width`
    a token. A query reads the `most` blocks that score highest."""

    layer: int
    block: int
    size: int
    width: int
    most: int

    @property
    def parts(self) -> tuple[PartNeed, ...]:
        """Keys, and the last rows before the next token as they came, oldest first. Their position says how
        many are the open block's; the others are not read."""
        return (
            BlocksSpec(POOLED, self.layer, self.size, self.block),
            PointSpec(OPEN, self.layer, (self.block - 1, self.width)),
        )

    def append(self, view: View, rows: torch.Tensor, pool: Pool) -> None:
        """Take in `rows` [tokens, width] of a ubatch, and store the keys of the blocks that they close."""
        before = view.point(OPEN, self.layer)
        lines = torch.cat((before, rows.float().view(len(before), -1, rows.shape[1])), 1)
        for line, segment in zip(lines, view.segments, strict=True):
            start = int(view.positions[segment.start])
            closed = closing(line, start, self.block)
            first = start // self.block
            numbers = torch.arange(first, first + len(closed), device=rows.device)
            view.close(POOLED, self.layer, segment, pool(closed, numbers * self.block))
        view.set_point(OPEN, self.layer, newest_windows(lines, self.block - 1, view.newest))

    def choose(self, view: View, q: torch.Tensor, weights: torch.Tensor) -> Chosen | None:
        """What queries `q` [tokens, heads, size] with `weights` [tokens, heads] may read, both in any dtype;
        None while that is all there is."""
        if int(view.positions.max() + 1) // self.block <= self.most:
            return None
        chosen = []
        q = view.into_basis(POOLED, self.layer, q)
        for segment in view.segments:
            keys = view.blocks(POOLED, self.layer, segment)
            rows = slice(segment.start, segment.stop)
            positions = torch.from_numpy(view.positions[rows]).to(q.device)
            picked = pick_blocks(block_scores(q[rows], weights[rows], keys), positions, self.block, self.most)
            chosen.append(rows_of_blocks(picked, positions, self.block))
        return chosen


def closing(line: torch.Tensor, start: int, block: int) -> torch.Tensor:
    """[blocks, block, width]: the blocks that end from position `start` on, whose row has block - 1 before it
    in `line` [rows, width]."""
    num_closed = (start + len(line) - block + 1) // block - start // block
    # Token t is at block - 1 + t of the line, so the block that it ends begins at t.
    at = -(start + 1) % block
    return line[at : at + num_closed * block].view(num_closed, block, line.shape[1])


def block_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The `lightning_scores` of `keys` [blocks, size] in any dtype, some queries at a time."""
    wide = keys.float()
    parts = zip(torch.split(q, QUERIES), torch.split(weights, QUERIES), strict=True)
    return torch.cat([lightning_scores(some.float(), shares.float(), wide) for some, shares in parts])


def pick_blocks(scores: torch.Tensor, positions: torch.Tensor, block: int, most: int) -> torch.Tensor:
    """bool [queries, blocks]: of the blocks that are closed at each of `positions` [queries], the `most` that
    have the highest `scores`; among equals the earlier ones. A query that ends a block may read it."""
    closed = _numbers(scores.shape[1], positions) < ((positions + 1) // block)[:, None]
    return best(scores, closed, most)


def rows_of_blocks(picked: torch.Tensor, positions: torch.Tensor, block: int) -> torch.Tensor:
    """bool [queries, rows] up to the last of `positions`: those of the blocks that each query has picked, and
    those of the block that is open then, up to the query's own."""
    num_rows = int(positions[-1]) + 1
    open_from = (positions + 1) // block * block
    numbers = _numbers(num_rows, positions)
    still_open = (numbers >= open_from[:, None]) & (numbers <= positions[:, None])
    rows = picked.repeat_interleave(block, dim=1)
    still_open[:, : rows.shape[1]] |= rows
    return still_open


def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)[None]

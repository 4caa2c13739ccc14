"""The indexer of Qwen4-Exp: which blocks of tokens a query attends to (Qwen Sparse Attention).

A block's key is the mean of its tokens' keys, normalised and turned to the position of its first token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.hybrid_idx import PooledIndex
from engine.cache.memory import Chosen, View
from engine.linear import Linear
from engine.models.layers import RmsNorm
from engine.rope import Angles, Rotary, turn


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """`inputs` has the rows of `num_heads` queries, then those of one key."""

    index: PooledIndex
    num_heads: int
    inputs: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    rotary: Rotary

    def __call__(self, x: torch.Tensor, angles: Angles, view: View) -> Chosen | None:
        """What each token of `x` [tokens, width], in the model's dtype, may see, None for
        all there is; the index takes them in."""
        size = self.index.size
        q, keys = torch.split(self.inputs(x).float(), [self.num_heads * size, size], dim=-1)
        self.index.append(view, keys, self._pooled)
        q = turn(self.q_norm(q.view(-1, self.num_heads, size)), angles)
        return self.index.choose(view, q, q.new_ones(q.shape[:2]))

    def _pooled(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        keys = self.k_norm(rows.mean(1))[:, None]
        return turn(keys, self.rotary.angles(positions, keys.device))[:, 0]

"""The layers of MiniMax-M3: grouped-query attention over chosen blocks of tokens, and clamped gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.msa import BlockLaw, choose_tokens
from engine.cache.table import INDEX
from engine.linear import Linear
from engine.models.decoder import Pass
from engine.models.layers import HeadNorm, Projection, RmsNorm
from engine.models.moe import by_expert
from engine.models.sizes import Sizes
from engine.parallel.ranks import Ranks
from engine.rope import turn

#: the kind of every layer, for its angles
ALL = "all"


@dataclass(frozen=True, slots=True)
class Indexer:
    """Index vectors are [q for each key-value head, k], each normalised; RoPE turns them as it does heads."""

    norm: HeadNorm
    law: BlockLaw


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Grouped-query attention of one layer, over what its indexer chooses if it has one. `inputs` makes q, k,
    v and then the index vectors."""

    layer: int
    inputs: Linear
    out: Projection
    sizes: Sizes
    norm: HeadNorm
    indexer: Indexer | None

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        sizes = self.sizes
        heads, kv_heads, size = sizes.num_heads, sizes.num_kv_heads, sizes.head_size
        flat = self.inputs(x)
        qk_rows, v_rows = (heads + kv_heads) * size, kv_heads * size
        rows = [qk_rows, v_rows, flat.shape[1] - qk_rows - v_rows]
        flat_qk, flat_v, flat_index = torch.split(flat, rows, -1)
        qk = self.norm(flat_qk.view(len(x), -1, size).float())
        q, k = torch.split(turn(qk, step.angles[ALL]).to(x.dtype), [heads, kv_heads], 1)
        chosen = None if self.indexer is None else self._choose(self.indexer, flat_index, step)
        v = flat_v.view(len(x), kv_heads, size)
        attended = step.view.attend(self.layer, q, k, v, size**-0.5, chosen=chosen)
        return self.out(attended.reshape(len(x), -1))

    def _choose(self, indexer: Indexer, flat: torch.Tensor, step: Pass) -> list[torch.Tensor]:
        """What each segment's queries may see."""
        view, groups = step.view, self.sizes.num_kv_heads
        qk = indexer.norm(flat.view(len(flat), groups + 1, -1).float())
        q, k = torch.split(turn(qk, step.angles[ALL]).to(flat.dtype), [groups, 1], 1)
        view.append(INDEX, self.layer, k)
        if not groups:  # a rank without heads
            return []
        q = view.into_basis(INDEX, self.layer, q)
        chosen = []
        for segment in view.segments:
            held = view.held(INDEX, self.layer, segment)
            rows = slice(segment.start, segment.stop)
            keys_at = torch.from_numpy(held.positions).to(q.device)
            chosen.append(choose_tokens(q[rows], step.positions[rows], held.rows[:, 0], keys_at, indexer.law))
        return chosen


@dataclass(frozen=True, slots=True)
class Gate:
    """(up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit` and up within it."""

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * inner], the gate's values first, to [..., inner]."""
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


@dataclass(frozen=True, slots=True)
class Dense:
    gate_up: Linear
    down: Projection
    gate: Gate
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, width] to the same; computed in `dtype`."""
        return self.down(self.gate(self.gate_up(x.to(self.dtype)))).float()


@dataclass(frozen=True, slots=True)
class Routed:
    """A shared expert, and `num_chosen` of many by the sigmoids of their scores: chosen with `bias`, weighed
    without it."""

    router: Linear  # float32
    bias: torch.Tensor
    gate_up: torch.Tensor  # [experts, 2 * inner, width]
    down: torch.Tensor  # [experts, width, inner]
    gate: Gate
    shared: Dense
    num_chosen: int
    scale: float
    ranks: Ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `Dense`."""
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(self.num_chosen).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        found = by_expert(x.to(self.down.dtype), chosen, weights, self._expert)
        return self.ranks.total(found) + self.shared(x)

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.gate(F.linear(x, self.gate_up[number])), self.down[number])


@dataclass(frozen=True, slots=True)
class MiniMaxM3Block:
    attention_norm: RmsNorm
    attention: BlockAttention
    ffn_norm: RmsNorm
    ffn: Dense | Routed

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x).to(step.dtype), step)
        return x + self.ffn(self.ffn_norm(x))

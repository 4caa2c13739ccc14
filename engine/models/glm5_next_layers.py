"""The layers of GLM-5-Next that it has for itself: attention whose indexer pools its keys, and feed-forwards
that clamp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.hybrid_idx import PooledIndex
from engine.cache.memory import Chosen, View
from engine.linear import Linear
from engine.models.hyper import HyperConnection
from engine.models.kda import DeltaAttention
from engine.models.layers import LayerNorm, Projection, RmsNorm
from engine.models.mla import LatentAttention
from engine.models.moe import by_expert
from engine.models.routing import Law
from engine.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class PoolIndexer:
    """Chooses blocks of tokens. A block's key is a mean of its tokens' keys, weighted channel by channel with
    the softmax of what `keys_gates` says behind the key; `bias` [block, size] is added to that by the place
    in the block.

    `queries` reads the latent of q; `shares` is float32, and gives each head's share of a query's scores.
    """

    index: PooledIndex
    keys_gates: Linear
    key_norm: LayerNorm
    bias: torch.Tensor
    queries: Linear
    shares: Linear

    def __call__(self, x: torch.Tensor, latent: torch.Tensor, view: View) -> Chosen | None:
        """What each token may see, None for all there is; the index takes them in. `x` [tokens, width] and
        `latent` [tokens, q_rank] are in the model's dtype."""
        keys, gates = self.keys_gates(x).float().chunk(2, -1)
        self.index.append(view, torch.cat((self.key_norm(keys), gates), -1), self._pooled)
        q = self.queries(latent).view(len(x), -1, self.index.size)
        return self.index.choose(view, q, self.shares(x.float()))

    def _pooled(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        keys, gates = rows.chunk(2, -1)
        return ((gates + self.bias).softmax(1) * keys).sum(1)


@dataclass(frozen=True, slots=True)
class PooledAttention:
    """Latent attention without positions, over what its indexer chooses; without one, over what the last
    layer that has one chose."""

    attention: LatentAttention
    indexer: PoolIndexer | None

    def __call__(
        self, x: torch.Tensor, view: View, chosen: Chosen | None
    ) -> tuple[torch.Tensor, Chosen | None]:
        """`x` [tokens, width] in the model's dtype; the same shape comes back, and what was chosen."""
        lowered = self.attention.lower(x, None)
        if self.indexer is not None:
            chosen = self.indexer(x, lowered.latent, view)
        return self.attention(x, lowered, None, view, chosen), chosen


def clamped(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up, the gate at most `limit` and up within it: [.., 2 * inner], the gate's values first,
    to [.., inner]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


@dataclass(frozen=True, slots=True)
class ClampedFeedForward:
    gate_up: Linear
    down: Projection
    limit: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(clamped(self.gate_up(x), self.limit))


@dataclass(frozen=True, slots=True)
class ClampedMixture:
    """What the law chooses of the experts, and `shared` that every token goes to. `gate_up` is [experts, 2 *
    inner, width], `down` [experts, width, inner]; `router` is float32."""

    router: Linear
    law: Law
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: ClampedFeedForward
    ranks: Ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype, to float32."""
        chosen, weights = self.law(self.router(x.float()))
        return self.ranks.total(by_expert(x, chosen, weights, self._expert)) + self.shared(x).float()

    def _expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        inner = clamped(F.linear(rows, self.gate_up[expert]), self.shared.limit)
        return F.linear(inner, self.down[expert])


@dataclass(frozen=True, slots=True)
class GlmBlock:
    """A layer between residual streams, of one kind or the other. Its matrices are in `dtype`."""

    mixer_streams: HyperConnection
    mixer_norm: RmsNorm
    mixer: DeltaAttention | PooledAttention
    ffn_streams: HyperConnection
    ffn_norm: RmsNorm
    ffn: ClampedFeedForward | ClampedMixture
    dtype: torch.dtype

    def __call__(
        self, streams: torch.Tensor, chosen: Chosen | None, view: View
    ) -> tuple[torch.Tensor, Chosen | None]:
        """`streams` float32 [tokens, streams, width], and what the last indexer before this layer chose; both
        as they are behind it."""
        crossing = self.mixer_streams(streams)
        x = self.mixer_norm(crossing.input).to(self.dtype)
        if isinstance(self.mixer, DeltaAttention):
            out = self.mixer(x, view)
        else:
            out, chosen = self.mixer(x, view, chosen)
        crossing = self.ffn_streams(crossing.passed(out.float()))
        out = self.ffn(self.ffn_norm(crossing.input).to(self.dtype))
        return crossing.passed(out.float()), chosen

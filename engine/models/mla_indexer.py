"""The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2-Exp technical report, section 2.1): small
heads of its own that choose the rows a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.dsa import choose
from engine.cache.memory import Basis, Chosen, RowsSpec, Turned, View
from engine.cache.table import INDEX
from engine.linear import Linear
from engine.models.fields import Fields
from engine.models.layers import LayerNorm
from engine.models.loading import Loader, halves_of_pairs
from engine.models.mla import LatentSizes
from engine.rope import Angles, Rotary, turn

#: word of layer_types
INDEXED = "indexed_attention"

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Counts, and sizes in values: of x, of the queries' latent, and of a head, of which the first `rope`
    turn. `pairs` says whether the file's RoPE is of consecutive values: families differ here, and from what
    their attention does."""

    width: int
    q_rank: int
    num_heads: int
    head: int
    rope: int
    num_chosen: int
    pairs: bool


def read_index_sizes(fields: Fields, latent: LatentSizes, pairs: bool) -> IndexSizes:
    """Of the indexers in layers whose attention is `latent`. Raises WeightsRefused."""
    if latent.q_rank is None:
        raise fields.refused("q_lora_rank", None)
    fields.only("indexer_rope_interleave", pairs, pairs)
    head = fields.count("index_head_dim", least=latent.rope)
    if head & -head < 2:
        # Keys are stored Hadamard-rotated, and there is no rotation of an odd number of values.
        raise fields.refused("index_head_dim", head)
    return IndexSizes(
        width=latent.width,
        q_rank=latent.q_rank,
        num_heads=fields.count("index_n_heads"),
        head=head,
        rope=latent.rope,
        num_chosen=fields.count("index_topk"),
        pairs=pairs,
    )


def index_rows(layer: int, sizes: IndexSizes, rotary: Rotary) -> RowsSpec:
    """The part of one layer: keys, Hadamard-rotated after RoPE whatever their dtype, as the model was trained
    to have them. Scores are of both sides rotated, and so are what they would be without."""
    return RowsSpec(INDEX, layer, 1, sizes.head, turned=Turned(rotary), basis=Basis.ROTATED)


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer. `weights` is float32, and gives each head's share of a query's scores."""

    layer: int
    sizes: IndexSizes
    q_up: Linear
    k: Linear
    k_norm: LayerNorm
    weights: Linear

    def __call__(self, x: torch.Tensor, latent: torch.Tensor, angles: Angles, view: View) -> Chosen | None:
        """Keeps the keys of this pass and chooses for every token of it; None where that is all there is.

        `x` [tokens, width] and the queries' `latent` [tokens, q_rank], both in the model's dtype.
        """
        sizes = self.sizes
        keys = turn(self.k_norm(self.k(x).float())[:, None], angles)
        view.append(INDEX, self.layer, keys.to(x.dtype))
        if int(view.positions.max()) < sizes.num_chosen:
            return None
        q = turn(self.q_up(latent).view(-1, sizes.num_heads, sizes.head).float(), angles)
        q = view.into_basis(INDEX, self.layer, q)
        weights = self.weights(x.float()) * (sizes.num_heads * sizes.head) ** -0.5
        chosen = []
        for segment in view.segments:
            at = slice(segment.start, segment.stop)
            held = view.held(INDEX, self.layer, segment)
            rows = held.rows[:, 0].float()
            chosen.append(
                choose(q[at], weights[at], rows, view.positions[at], held.positions, sizes.num_chosen)
            )
        return chosen


def load_indexer(load: Loader, prefix: str, layer: int, sizes: IndexSizes) -> Indexer:
    """The tensors of `prefix` under the hub's names."""
    q = load.tensor(f"{prefix}.wq_b.weight", sizes.num_heads * sizes.head, sizes.q_rank)
    k = load.tensor(f"{prefix}.wk.weight", sizes.head, sizes.width)
    norm, bias = (load.exact(f"{prefix}.k_norm.{name}", sizes.head) for name in ("weight", "bias"))
    if sizes.pairs:
        q, k, norm, bias = (halves_of_pairs(rows, sizes.head, sizes.rope) for rows in (q, k, norm, bias))
    return Indexer(
        layer=layer,
        sizes=sizes,
        q_up=Linear(q),
        k=Linear(k),
        k_norm=LayerNorm(norm, bias, _EPS),
        weights=Linear(load.exact(f"{prefix}.weights_proj.weight", sizes.num_heads, sizes.width)),
    )

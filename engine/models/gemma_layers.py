"""What Gemma 3n and Gemma 4 share: attention whose q, k and v are all normed and whose rows may be another
layer's, and an input of its own for every layer (Gemma 3n model card; "Per-Layer Embeddings")."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.linear import Linear
from engine.models.decoder import Pass
from engine.models.fields import Fields
from engine.models.gemma2 import rounded_root
from engine.models.gemma3 import gelu
from engine.models.layers import Projection, RmsNorm
from engine.models.loading import Loader
from engine.models.sizes import Sizes
from engine.parallel.share import values_of
from engine.rope import turn


@dataclass(frozen=True, slots=True)
class NormedAttention:
    """Grouped-query attention over the rows of the layer `source`, scores not scaled.

    `project` gives rows of q, and for a layer with rows of its own those of k and v; where v has none, k's
    rows are v's too. RoPE turns q and k behind their norms; that of v has no weights.
    """

    source: int
    kind: str
    project: Linear
    out: Projection
    num_heads: int
    num_kv_heads: int
    q_norm: RmsNorm
    k_norm: RmsNorm | None

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        angles, heads, size = step.angles[self.kind], self.num_heads, self.q_norm.weight.numel()
        projected = self.project(x)
        rows = projected.view(x.shape[0], projected.shape[1] // size, size).float()
        q = turn(self.q_norm(rows[:, :heads]), angles).to(x.dtype)
        k = v = None
        if self.k_norm is not None:
            own, last = rows[:, heads:][:, : self.num_kv_heads], rows[:, rows.shape[1] - self.num_kv_heads :]
            k = turn(self.k_norm(own), angles).to(x.dtype)
            v = F.rms_norm(last, (size,), None, self.k_norm.eps).to(x.dtype)
        return self.out(step.view.attend(self.source, q, k, v, 1.0).reshape(x.shape[0], -1))


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer: how many there are of keys, and how many values each has."""

    num_kv_heads: int
    size: int


def load_normed_attention(
    load: Loader,
    prefix: str,
    sizes: Sizes,
    heads: Heads,
    layer: int,
    source: int,
    kind: str,
    eps: float,
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
) -> NormedAttention:
    """`projections` are those of a layer with rows of its own; others have q's alone."""
    own = layer == source
    q_rows, kv_rows = sizes.num_heads * heads.size, heads.num_kv_heads * heads.size
    names = tuple(f"{prefix}.{name}" for name in (projections if own else projections[:1]))
    mine = load.share.heads(sizes.num_heads, heads.num_kv_heads)
    keep = mine.joined(heads.size, heads.size)[: len(names)]
    return NormedAttention(
        source=source,
        kind=kind,
        project=load.linear(names, (q_rows, kv_rows, kv_rows)[: len(names)], sizes.width, keep),
        out=load.summed(f"{prefix}.o_proj", sizes.width, q_rows, values_of(mine.q, heads.size)),
        num_heads=len(mine.q),
        num_kv_heads=len(mine.kv),
        q_norm=load.norm(f"{prefix}.q_norm", heads.size, eps),
        k_norm=load.norm(f"{prefix}.k_norm", heads.size, eps) if own else None,
    )


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What each layer is told of a token: by a table of ids, and by the token's embedding.

    `table` is [ids, layers * size]; ids that it does not have count as 0.
    """

    table: torch.Tensor
    table_scale: float
    project: Linear
    norm: RmsNorm
    num_layers: int

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], and their embeddings float32 [tokens, width], to float32 [layers, tokens, size]."""
        known = torch.where(tokens < self.table.shape[0], tokens, 0).to(self.table.device)
        by_id = F.embedding(known, self.table).float() * self.table_scale
        by_embedding = self.project(x.to(self.table.dtype)).float() * x.shape[1] ** -0.5
        split = (x.shape[0], self.num_layers, -1)
        both: torch.Tensor = self.norm(by_embedding.view(split)) + by_id.view(split)
        return both.transpose(0, 1) * math.sqrt(0.5)


def load_layer_inputs(load: Loader, fields: Fields, sizes: Sizes, prefix: str, eps: float) -> LayerInputs:
    size, num_ids = fields.count("hidden_size_per_layer_input"), fields.count("vocab_size_per_layer_input")
    all_layers = sizes.num_layers * size
    table = load.tensor(f"{prefix}.embed_tokens_per_layer.weight", num_ids, all_layers)
    return LayerInputs(
        table=table,
        table_scale=rounded_root(size, table.dtype),
        project=load.linear((f"{prefix}.per_layer_model_projection",), (all_layers,), sizes.width),
        norm=load.norm(f"{prefix}.per_layer_projection_norm", size, eps),
        num_layers=sizes.num_layers,
    )


@dataclass(frozen=True, slots=True)
class LayerInputMix:
    """norm(out(gelu(gate x) * input)): what a layer makes of the input that is its own."""

    gate: Linear
    out: Linear
    norm: RmsNorm

    def __call__(self, x: torch.Tensor, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """float32 x [tokens, width] and `given` [tokens, size] to float32 [tokens, width]."""
        h = gelu(self.gate(x.to(dtype))) * given.to(dtype)
        return self.norm(self.out(h).float())


def load_layer_input_mix(load: Loader, prefix: str, width: int, size: int, eps: float) -> LayerInputMix:
    return LayerInputMix(
        gate=load.linear((f"{prefix}.per_layer_input_gate",), (size,), width),
        out=load.linear((f"{prefix}.per_layer_projection",), (width,), size),
        norm=load.norm(f"{prefix}.post_per_layer_input_norm", width, eps),
    )

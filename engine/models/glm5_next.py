"""GLM-5-Next: layers of Kimi Delta Attention, and to every few of them one of latent attention without
positions that reads the blocks which an indexer chooses; hyper-connections, and a mixture of experts. Of a
model that also sees, the text decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import Chosen, MemoryNeeds, View
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.conv import ShortConv, load_conv
from engine.models.fields import Fields
from engine.models.glm5_next_config import LINEAR, Glm5NextConfig, read_config
from engine.models.glm5_next_layers import (
    ClampedFeedForward,
    ClampedMixture,
    GlmBlock,
    PooledAttention,
    PoolIndexer,
)
from engine.models.hyper import HyperConnection
from engine.models.kda import DeltaAttention, load_delta_attention, load_forgetting
from engine.models.layers import LayerNorm
from engine.models.loading import Loader, hub_head, hub_prefix
from engine.models.mla import load_latent_attention
from engine.models.mla_ffn import DENSE, MAX_EXPERTS, load_biased_sigmoid
from engine.parallel.share import moved, values_of
from engine.state import Value

_INDEX_EPS = 1e-6


class Glm5Next:
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        load, fields = Loader(weights, placement), Fields(weights)
        config = read_config(weights, fields)
        build = _Builder(load, fields, config, hub_prefix(load), placement.dtype)
        sizes = config.sizes
        self._architecture = weights.architecture
        self._config = config
        self._placement = placement
        self._embedding = load.tensor(f"{build.prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
        self._blocks = tuple(build.block(layer) for layer in range(sizes.num_layers))
        self._norm = load.norm(f"{build.prefix}.norm", sizes.width, config.eps)
        self._head = hub_head(load, fields, sizes, self._embedding, tied=False)
        self._fields = fields.meaning

    @property
    def needs(self) -> MemoryNeeds:
        return self._config.needs

    @property
    def vocab_size(self) -> int:
        return self._config.sizes.vocab_size

    @property
    def n_ctx_train(self) -> int:
        return self._config.sizes.n_ctx_train

    @property
    def meaning(self) -> Mapping[str, Value]:
        return {"architecture": self._architecture, **self._fields}

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        device = self._placement.device
        x = F.embedding(tokens.to(device), self._embedding).float()
        streams = x[:, None].expand(-1, self._config.streams.num_streams, -1)
        chosen: Chosen | None = None
        for block in self._blocks:
            streams, chosen = block(streams, chosen, view)
        mean = streams[outputs.to(device)].mean(1)
        return self._head(self._norm(mean).to(self._placement.dtype)).float()


@dataclass(frozen=True, slots=True)
class _Builder:
    load: Loader
    fields: Fields
    config: Glm5NextConfig
    prefix: str
    dtype: torch.dtype

    def block(self, layer: int) -> GlmBlock:
        prefix, width, eps = f"{self.prefix}.layers.{layer}", self.config.sizes.width, self.config.eps
        linear = self.config.kinds[layer] == LINEAR
        name = f"{prefix}.self_attn"
        return GlmBlock(
            mixer_streams=self._connection(f"{prefix}.hc_attn"),
            mixer_norm=self.load.norm(f"{prefix}.input_layernorm", width, eps),
            mixer=self._delta(layer, name) if linear else self._attention(layer, name),
            ffn_streams=self._connection(f"{prefix}.hc_ffn"),
            ffn_norm=self.load.norm(f"{prefix}.post_attention_layernorm", width, eps),
            ffn=self._ffn(layer, f"{prefix}.mlp"),
            dtype=self.dtype,
        )

    def _connection(self, prefix: str) -> HyperConnection:
        streams, width = self.config.streams, self.config.sizes.width
        rows = (2 + streams.num_streams) * streams.num_streams
        return HyperConnection(
            matrix=self.load.exact(f"{prefix}_fn", rows, streams.num_streams * width),
            base=self.load.exact(f"{prefix}_base", rows),
            scale=self.load.exact(f"{prefix}_scale", 3),
            iterations=streams.iterations,
            eps=streams.eps,
            rms_eps=self.config.eps,
        )

    def _delta(self, layer: int, prefix: str) -> DeltaAttention:
        load, config, sizes = self.load, self.config, self.config.delta
        convs = [
            load_conv(load, f"{prefix}.{which}_conv1d", sizes.width, sizes.kernel)
            for which in ("q", "k", "v")
        ]
        log_speed = load.exact(f"{prefix}.A_log", sizes.num_heads)
        return load_delta_attention(
            load,
            prefix,
            layer,
            config.sizes.width,
            sizes,
            conv=ShortConv(torch.cat([conv.weight for conv in convs])),
            forgetting=load_forgetting(load, prefix, sizes, log_speed, config.bound),
            eps=config.eps,
        )

    def _attention(self, layer: int, prefix: str) -> PooledAttention:
        latents, eps = self.config.latents, self.config.eps
        scale = latents.head**-0.5
        return PooledAttention(
            attention=load_latent_attention(self.load, prefix, layer, latents, scale, eps),
            indexer=self._indexer(layer, f"{prefix}.indexer") if layer in self.config.indexes else None,
        )

    def _indexer(self, layer: int, prefix: str) -> PoolIndexer:
        load, config, index = self.load, self.config, self.config.indexes[layer]
        size, heads, width = index.size, config.index_heads, config.sizes.width
        keys = load.tensor(f"{prefix}.wk.weight", size, width)
        gates = load.tensor(f"{prefix}.index_kpool_compress_gate", size, width)
        norm, norm_bias = (load.exact(f"{prefix}.k_norm.{which}", size) for which in ("weight", "bias"))
        return PoolIndexer(
            index=index,
            keys_gates=Linear(torch.cat((keys, gates))),
            key_norm=LayerNorm(norm, norm_bias, _INDEX_EPS),
            bias=load.exact(f"{prefix}.index_kpool_compress_ape", index.block, size),
            queries=load.linear((f"{prefix}.wq_b",), (heads * size,), config.q_rank),
            shares=Linear(load.exact(f"{prefix}.weights_proj.weight", heads, width)),
        )

    def _ffn(self, layer: int, prefix: str) -> ClampedFeedForward | ClampedMixture:
        load, fields, width = self.load, self.fields, self.config.sizes.width
        if self.config.ffns[layer] == DENSE:
            return self._feed_forward(prefix, fields.count("intermediate_size"))
        count, inner = (
            fields.count("n_routed_experts", most=MAX_EXPERTS),
            fields.count("moe_intermediate_size"),
        )
        names = [f"{prefix}.experts.{expert}" for expert in range(count)]
        mine = values_of(load.share.columns(inner), 1)
        pairs = [
            [load.tensor(f"{name}.{which}_proj.weight", inner, width)[mine] for which in ("gate", "up")]
            for name in names
        ]
        num_shared = fields.count("n_shared_experts", most=MAX_EXPERTS)
        return ClampedMixture(
            router=Linear(load.exact(f"{prefix}.gate.weight", count, width)),
            law=load_biased_sigmoid(load, fields, prefix),
            gate_up=torch.stack([torch.cat(pair) for pair in pairs]),
            down=torch.stack(
                [load.tensor(f"{name}.down_proj.weight", width, inner)[:, mine] for name in names]
            ),
            shared=self._feed_forward(f"{prefix}.shared_experts", num_shared * inner),
            ranks=load.ranks,
        )

    def _feed_forward(self, prefix: str, inner: int) -> ClampedFeedForward:
        width = self.config.sizes.width
        both = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        mine = values_of(self.load.share.columns(inner), 1)
        return ClampedFeedForward(
            gate_up=self.load.linear(both, (inner, inner), width, (mine, moved(mine, inner))),
            down=self.load.summed(f"{prefix}.down_proj", width, inner, mine),
            limit=self.config.limit,
        )

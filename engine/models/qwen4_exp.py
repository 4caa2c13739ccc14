"""Qwen4-Exp: gated delta nets, and to every few of them a layer of attention that reads the blocks which its
indexer chooses; several residual streams, and embeddings of n-grams in some layers. Of a model that also
sees, the text decoder: its three kinds of position are the same for text, so that RoPE is the plain one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, View
from engine.models.base import Placement, WeightSource, digest_of_frequencies
from engine.models.fields import Fields
from engine.models.gdn import DeltaNet
from engine.models.hub_experts import hub_experts
from engine.models.hyper_lowrank import Connection, load_connection, load_mixer
from engine.models.layers import Activation
from engine.models.loading import Loader, hub_ffn, hub_head, hub_prefix
from engine.models.ple import PerLayerEmbedding, load_ple
from engine.models.qwen3_next import (
    GatedAttention,
    SharedMixture,
    centred_norm,
    load_delta_net,
    load_gated_attention,
)
from engine.models.qwen4_exp_config import LINEAR, Qwen4ExpConfig, read_config
from engine.models.qwen4_exp_indexer import BlockIndexer
from engine.rope import Angles
from engine.state import Value

_GATES: Mapping[str, Activation] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Attention over what its indexer chooses."""

    attention: GatedAttention
    indexer: BlockIndexer

    def __call__(self, x: torch.Tensor, angles: Angles, view: View) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        return self.attention(x, angles, view, self.indexer(x, angles, view))


@dataclass(frozen=True, slots=True)
class StreamBlock:
    """A layer between residual streams, of one kind or the other."""

    ple: PerLayerEmbedding | None
    mixer_connection: Connection
    mixer: DeltaNet | SparseAttention
    ffn_connection: Connection
    ffn: SharedMixture

    def __call__(
        self, streams: torch.Tensor, tokens: torch.Tensor, angles: Angles, view: View
    ) -> torch.Tensor:
        """`streams` float32 [tokens, streams, width], `tokens` on the host."""
        if self.ple is not None:
            streams = streams + self.ple(streams, tokens, view)
        if isinstance(self.mixer, DeltaNet):
            streams = self.mixer_connection(streams, partial(self.mixer, view=view))
        else:
            streams = self.mixer_connection(streams, partial(self.mixer, angles=angles, view=view))
        return self.ffn_connection(streams, self.ffn)


class Qwen4Exp:
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        load, fields = Loader(weights, placement), Fields(weights)
        config = read_config(weights, fields, placement.n_ctx)
        build = _Builder(weights, load, placement, config, hub_prefix(load))
        sizes = config.sizes
        self._architecture = weights.architecture
        self._config = config
        self._placement = placement
        self._embedding = load.tensor(f"{build.prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
        self._blocks = tuple(build.block(layer) for layer in range(sizes.num_layers))
        mixer = f"{build.prefix}.hyper_connection_mixer"
        self._mixer = load_mixer(load, mixer, config.streams, placement.dtype)
        self._head = hub_head(load, fields, sizes, self._embedding, tied=False)
        self._fields = fields.meaning

    @property
    def needs(self) -> MemoryNeeds:
        plain = self._config.needs
        embeddings = (block.ple.part for block in self._blocks if block.ple is not None)
        return MemoryNeeds(plain.kind, (*plain.parts, *embeddings))

    @property
    def vocab_size(self) -> int:
        return self._config.sizes.vocab_size

    @property
    def n_ctx_train(self) -> int:
        return self._config.sizes.n_ctx_train

    @property
    def meaning(self) -> Mapping[str, Value]:
        frequencies = {"rope.frequencies": digest_of_frequencies(self.needs)}
        return {"architecture": self._architecture, **self._fields, **frequencies}

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        device = self._placement.device
        angles = self._config.rotary.angles(positions, device)
        x = F.embedding(tokens.to(device), self._embedding).float()
        streams = x[:, None].expand(-1, self._config.streams.num_streams, -1)
        for block in self._blocks:
            streams = block(streams, tokens, angles, view)
        mixed = self._mixer(streams[outputs.to(device)])
        return self._head(mixed.to(self._placement.dtype)).float()


@dataclass(frozen=True, slots=True)
class _Builder:
    weights: WeightSource
    load: Loader
    placement: Placement
    config: Qwen4ExpConfig
    prefix: str

    def block(self, layer: int) -> StreamBlock:
        prefix = f"{self.prefix}.layers.{layer}"
        linear = self.config.kinds[layer] == LINEAR
        return StreamBlock(
            ple=self._ple(layer, f"{prefix}.ple"),
            mixer_connection=self._connection(f"{prefix}.attn_hyper_connection"),
            mixer=self._delta(layer, prefix) if linear else self._attention(layer, prefix),
            ffn_connection=self._connection(f"{prefix}.mlp_hyper_connection"),
            ffn=self._mixture(f"{prefix}.mlp"),
        )

    def _connection(self, prefix: str) -> Connection:
        return load_connection(self.load, prefix, self.config.streams, self.placement.dtype)

    def _delta(self, layer: int, prefix: str) -> DeltaNet:
        delta, width, name = self.config.delta, self.config.sizes.width, f"{prefix}.linear_attn"
        rows = {"qkv": delta.channels, "z": delta.v_width, "b": delta.num_v_heads, "a": delta.num_v_heads}
        inputs = [self.load.tensor(f"{name}.in_proj_{which}.weight", n, width) for which, n in rows.items()]
        net = load_delta_net(self.load, name, layer, width, delta, inputs, self.config.eps)
        return dataclasses.replace(net, gate=_GATES[self.config.gate])

    def _attention(self, layer: int, prefix: str) -> SparseAttention:
        load, config, name = self.load, self.config, f"{prefix}.self_attn"
        index, heads = config.indexes[layer], config.index_heads
        rows = (heads + 1) * index.size
        return SparseAttention(
            attention=load_gated_attention(load, name, layer, config.sizes, config.eps),
            indexer=BlockIndexer(
                index=index,
                num_heads=heads,
                inputs=load.linear((f"{name}.indexer.index_qk_proj",), (rows,), config.sizes.width),
                q_norm=centred_norm(load, f"{name}.indexer.q_layernorm", index.size, config.eps),
                k_norm=centred_norm(load, f"{name}.indexer.k_layernorm", index.size, config.eps),
                rotary=config.rotary,
            ),
        )

    def _mixture(self, prefix: str) -> SharedMixture:
        load, sizes, width = self.load, self.config.mixture, self.config.sizes.width
        experts = sizes.num_experts
        return SharedMixture(
            router=load.linear((f"{prefix}.gate",), (experts,), width),
            num_chosen=sizes.num_chosen,
            normalised=sizes.normalised,
            experts=hub_experts(load, f"{prefix}.experts", experts, sizes.inner, width, F.silu),
            shared=hub_ffn(load, f"{prefix}.shared_expert", width, sizes.shared_inner, F.silu),
            shared_gate=load.linear((f"{prefix}.shared_expert_gate",), (1,), width),
        )

    def _ple(self, layer: int, prefix: str) -> PerLayerEmbedding | None:
        config = self.config
        if config.ple is None or layer not in config.ple.hashes:
            return None
        ngrams, sizes = config.ple.hashes[layer], config.ple.sizes
        return load_ple(self.weights, self.load, prefix, layer, ngrams, sizes, config.streams)

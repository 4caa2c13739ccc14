"""The numbers of a GLM-5-Next configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.hybrid_idx import PooledIndex
from engine.cache.memory import KEYS, MemoryNeeds, PartNeed, RowsSpec
from engine.models.base import WeightSource
from engine.models.fields import Fields
from engine.models.kda import KdaSizes
from engine.models.mla import LatentSizes
from engine.models.mla_ffn import read_kinds
from engine.models.sizes import FULL, Sizes, read_layer_types

LINEAR, INDEXED = "linear_attention", "indexed_attention"
OWN, SHARED = "full", "shared"

_MOST = 2**16


@dataclass(frozen=True, slots=True)
class StreamNumbers:
    """How many residual streams there are, and how their mixing matrices are made."""

    num_streams: int
    iterations: int
    eps: float


@dataclass(frozen=True, slots=True)
class Glm5NextConfig:
    """`kinds` says LINEAR or INDEXED of each layer, `ffns` DENSE or SPARSE. `indexes` are by layer, of those
    that have one of their own. `bound` is of a channel's forgetting in a token, `limit` of the values inside
    a feed-forward."""

    sizes: Sizes
    eps: float
    kinds: tuple[str, ...]
    ffns: tuple[str, ...]
    delta: KdaSizes
    bound: float | None
    latents: LatentSizes
    q_rank: int
    index_heads: int
    indexes: Mapping[int, PooledIndex]
    streams: StreamNumbers
    limit: float

    @property
    def needs(self) -> MemoryNeeds:
        parts: list[PartNeed] = []
        for layer, kind in enumerate(self.kinds):
            if kind == LINEAR:
                parts += self.delta.parts(layer)
                continue
            rank = self.latents.kv_rank
            parts.append(RowsSpec(KEYS, layer, 1, rank, value_size=rank))
            if layer in self.indexes:
                parts += self.indexes[layer].parts
        return MemoryNeeds("hybrid_idx" if self.indexes else "recurrent", tuple(parts))


def read_config(weights: WeightSource, fields: Fields) -> Glm5NextConfig:
    """Raises WeightsRefused."""
    fields.only("quantization_config", None)
    fields.only("hidden_act", "silu", "silu")
    fields.only("attention_bias", False, False)
    latents = _read_latents(fields)
    sizes = Sizes(
        num_layers=fields.count("num_hidden_layers", most=4096),
        width=latents.width,
        num_heads=latents.num_heads,
        num_kv_heads=1,
        head_size=latents.head,
        vocab_size=fields.count("vocab_size"),
        n_ctx_train=fields.count("max_position_embeddings"),
    )
    kinds = _read_kinds(fields, sizes.num_layers)
    delta, bound = _read_delta(weights, fields)
    return Glm5NextConfig(
        sizes=sizes,
        eps=fields.number("rms_norm_eps", 1e-5),
        kinds=kinds,
        ffns=read_kinds(fields, sizes.num_layers),
        delta=delta,
        bound=bound,
        latents=latents,
        q_rank=fields.count("q_lora_rank"),
        index_heads=fields.count("index_n_heads", most=_MOST),
        indexes=_read_indexes(fields, kinds),
        streams=StreamNumbers(
            num_streams=fields.count("hc_mult", 4, most=256),
            iterations=fields.count("hc_sinkhorn_iters", 20, most=_MOST),
            eps=fields.number("hc_eps", 1e-6),
        ),
        limit=fields.positive("swiglu_limit", 10.0),
    )


def _read_latents(fields: Fields) -> LatentSizes:
    num_heads = fields.count("num_attention_heads", most=_MOST)
    fields.only("num_key_value_heads", num_heads, num_heads)
    fields.only("qk_rope_head_dim", 0, 0)
    return LatentSizes(
        width=fields.count("hidden_size"),
        num_heads=num_heads,
        q_rank=fields.count("q_lora_rank"),
        kv_rank=fields.count("kv_lora_rank"),
        nope=fields.count("qk_nope_head_dim"),
        rope=0,
        value=fields.count("v_head_dim"),
        pairs=False,
    )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Files call a layer with an indexer full attention too."""
    default = tuple(INDEXED if layer % 4 == 3 else LINEAR for layer in range(num_layers))
    words = read_layer_types(fields, (LINEAR, INDEXED, FULL), default)
    return tuple(LINEAR if word == LINEAR else INDEXED for word in words)


def _read_delta(weights: WeightSource, fields: Fields) -> tuple[KdaSizes, float | None]:
    """Sizes, and the bound of forgetting. The hub's own files have them in an object, those that transformers
    writes among the rest."""
    if fields.has("linear_attn_config"):
        inner = fields.section("linear_attn_config")
        sizes = KdaSizes(
            num_heads=inner.count("num_heads", most=_MOST),
            head_size=inner.count("head_dim", most=_MOST),
            kernel=inner.count("short_conv_kernel_size", least=2, most=_MOST),
        )
        inner.only("safe_gate", True, True)
        bound: float | None = inner.number("gate_lower_bound", -5.0)
    else:
        sizes = KdaSizes(
            num_heads=fields.count("linear_num_heads", most=_MOST),
            head_size=fields.count("linear_head_dim", most=_MOST),
            kernel=fields.count("linear_conv_kernel_dim", least=2, most=_MOST),
        )
        # Null is no bound, and to say nothing would be -5: better to refuse than to mix them up.
        if "linear_lower_bound" not in weights.hparams:
            raise fields.refused("linear_lower_bound", None)
        bound = fields.number("linear_lower_bound") if fields.has("linear_lower_bound") else None
    if bound is not None and bound >= 0:
        raise fields.refused("linear_lower_bound or gate_lower_bound", bound)
    return sizes, bound


def _read_indexes(fields: Fields, kinds: tuple[str, ...]) -> dict[int, PooledIndex]:
    layers = [layer for layer, kind in enumerate(kinds) if kind == INDEXED]
    indexers = _read_indexers(fields, len(kinds))
    if layers and indexers[layers[0]] == SHARED:
        raise fields.refused("indexer_types", f"{SHARED} in layer {layers[0]}, with none before it,")
    size = fields.count("index_head_dim", most=_MOST)
    # The key of a block of one token would be a row a token: no model has that.
    block = fields.count("index_kpool", 16, least=2, most=2**20)
    chosen = fields.count("index_topk", least=block)
    if chosen % block:
        raise fields.refused("index_topk", chosen)
    # Otherwise the first tokens would see nothing, not even themselves.
    fields.only("index_kpool_always_select_tail", True, True)
    return {
        layer: PooledIndex(layer, block, size, 2 * size, chosen // block)
        for layer in layers
        if indexers[layer] == OWN
    }


def _read_indexers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """OWN or SHARED of each layer, linear ones too: by name, or every so many from a layer on."""
    if fields.has("indexer_types"):
        return fields.words("indexer_types", num_layers, (OWN, SHARED))
    fields.only("index_topk_pattern", None)
    every = fields.count("index_topk_freq", 1)
    first = fields.count("index_skip_topk_offset", 2, least=0)
    return tuple(SHARED if max(layer - first + 1, 0) % every else OWN for layer in range(num_layers))

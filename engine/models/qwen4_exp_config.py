"""The numbers of a Qwen4-Exp configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.hybrid_idx import PooledIndex
from engine.cache.memory import MemoryNeeds, PartNeed, keys_and_values
from engine.models.base import WeightSource
from engine.models.fields import Fields
from engine.models.gdn import DeltaSizes, read_delta_sizes
from engine.models.hub_rope import read_rope
from engine.models.hyper_lowrank import StreamSizes
from engine.models.ngram import NgramHash, build_hash
from engine.models.ple import PleSizes
from engine.models.sizes import FULL, Sizes, read_layer_types, read_sizes
from engine.rope import Rotary

LINEAR, INDEXED = "linear_attention", "indexed_attention"

_MOST_HEADS = 2**16
_MOST_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    num_experts: int
    num_chosen: int
    inner: int
    shared_inner: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class PleConfig:
    """`hashes` are by layer."""

    sizes: PleSizes
    hashes: Mapping[int, NgramHash]


@dataclass(frozen=True, slots=True)
class Qwen4ExpConfig:
    """`kinds` says LINEAR or INDEXED of each layer. `indexes` are by layer, of those that have one; their
    queries have `index_heads`."""

    sizes: Sizes
    eps: float
    kinds: tuple[str, ...]
    rotary: Rotary
    delta: DeltaSizes
    gate: str
    streams: StreamSizes
    mixture: MixtureSizes
    index_heads: int
    indexes: Mapping[int, PooledIndex]
    ple: PleConfig | None

    @property
    def needs(self) -> MemoryNeeds:
        """All but the parts of per-layer embeddings."""
        parts: list[PartNeed] = []
        size = self.sizes.head_size
        for layer, kind in enumerate(self.kinds):
            if kind == LINEAR:
                parts += self.delta.parts(layer)
            else:
                parts += keys_and_values(layer, self.sizes.num_kv_heads, size, size, self.rotary)
                parts += self.indexes[layer].parts
        return MemoryNeeds("hybrid_idx" if self.indexes else "recurrent", tuple(parts))


def read_config(weights: WeightSource, fields: Fields, n_ctx: int) -> Qwen4ExpConfig:
    """Raises WeightsRefused."""
    fields.only("hidden_act", "silu", "silu")
    fields.only("attention_bias", False, False)
    sizes, eps = read_sizes(fields), fields.number("rms_norm_eps", 1e-6)
    kinds = _read_kinds(fields, sizes.num_layers)
    rotary = read_rope(fields, sizes.head_size, n_ctx)
    indexed = [layer for layer, kind in enumerate(kinds) if kind == INDEXED]
    index_heads, indexes = _read_indexes(fields, indexed, rotary) if indexed else (0, {})
    return Qwen4ExpConfig(
        sizes=sizes,
        eps=eps,
        kinds=kinds,
        rotary=rotary,
        delta=read_delta_sizes(fields),
        gate=fields.word("output_gate_type", ("sigmoid", "silu"), "silu"),
        streams=StreamSizes(
            num_streams=fields.count("hc_count", 4, least=2, most=_MOST_HEADS),
            width=sizes.width,
            rank=fields.count("hc_lowrank", 320),
            eps=eps,
        ),
        mixture=_read_mixture(fields),
        index_heads=index_heads,
        indexes=indexes,
        ple=_read_ple(weights, fields, sizes, kinds),
    )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Files call a layer with an indexer full attention too."""
    every = fields.count("full_attention_interval", 4)
    default = tuple(LINEAR if (layer + 1) % every else INDEXED for layer in range(num_layers))
    words = read_layer_types(fields, (LINEAR, INDEXED, FULL), default)
    return tuple(LINEAR if word == LINEAR else INDEXED for word in words)


def _read_indexes(fields: Fields, layers: list[int], rotary: Rotary) -> tuple[int, dict[int, PooledIndex]]:
    num_heads = fields.count("indexer_n_heads", most=_MOST_HEADS)
    fields.only("indexer_kv_heads", 1)
    size = fields.count("indexer_head_dim", most=_MOST_HEADS)
    if rotary.n_rot > size:
        raise fields.refused("indexer_head_dim", size)
    # The key of a block of one token would be a row a token: no model has that.
    block = fields.count("indexer_compress_ratio", least=2, most=_MOST_TOKENS)
    budget = fields.count("indexer_budget", least=block)
    if budget % block:
        raise fields.refused("indexer_budget", budget)
    return num_heads, {layer: PooledIndex(layer, block, size, size, budget // block) for layer in layers}


def _read_mixture(fields: Fields) -> MixtureSizes:
    num_experts = fields.count("num_experts", most=_MOST_HEADS)
    return MixtureSizes(
        num_experts=num_experts,
        num_chosen=fields.count("num_experts_per_tok", most=num_experts),
        inner=fields.count("moe_intermediate_size"),
        shared_inner=fields.count("shared_expert_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", True),
    )


def _read_ple(
    weights: WeightSource, fields: Fields, sizes: Sizes, kinds: tuple[str, ...]
) -> PleConfig | None:
    """Layers are numbered from 1 here; the reference has such embeddings in linear layers alone."""
    given = fields.counts("ple_layer_ids", least=1, most=len(kinds)) if fields.has("ple_layer_ids") else ()
    layers = sorted({number - 1 for number in given})
    if not layers:
        return None
    if any(kinds[layer] != LINEAR for layer in layers):
        raise fields.refused("ple_layer_ids", " ".join(map(str, given)))
    longest = fields.count("ngram_size", 3, least=2, most=16)
    heads = fields.count("heads_per_ngram", 8, most=64)
    embedding = fields.count("ple_embed_dim", sizes.width)
    if embedding % ((longest - 1) * heads):
        raise fields.refused("ple_embed_dim", embedding)
    base = fields.count("ngram_vocab_size_base", 20_000_000)
    seed = fields.count("seed", 1234, least=0)
    end = _read_end(weights, fields)
    return PleConfig(
        PleSizes(
            embedding=embedding,
            kernel=fields.count("ple_conv_kernel_size", 4, least=2, most=256),
            dilation=longest,
            padded_to=fields.count("make_ngram_vocab_size_divisible_by", 128),
            num_shards=fields.count("split_ngram_parts", 512, most=_MOST_TOKENS),
        ),
        {
            layer: build_hash(index, longest, heads, base, sizes.vocab_size, seed, end)
            for index, layer in enumerate(layers)
        },
    )


def _read_end(weights: WeightSource, fields: Fields) -> int:
    """The first of the tokens that end a text."""
    if not isinstance(weights.hparams.get("eos_token_id"), list):
        return fields.count("eos_token_id", least=0)
    ends = fields.counts("eos_token_id")
    if not ends:
        raise fields.refused("eos_token_id", None)
    return ends[0]

"""MiniMax-M3's configuration, under transformers' names and those of the hub's checkpoint, and what a model
of these sizes asks to be remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.memory import MemoryNeeds, PartNeed, RowsSpec, Turned, keys_and_values
from engine.cache.msa import BlockLaw
from engine.cache.table import INDEX
from engine.models.fields import MOST, Fields
from engine.models.hub_rope import read_rope
from engine.models.sizes import FULL, Sizes, read_sizes
from engine.rope import Rotary
from engine.state import Value

_SPARSE = "minimax_m3_sparse"


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """`size` of an index vector, in values, and what is chosen by it."""

    size: int
    law: BlockLaw


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Inner sizes in values; `num_chosen` of `count` experts for each token, their sum times `scale`."""

    count: int
    num_chosen: int
    inner: int
    shared_inner: int
    scale: float


@dataclass(frozen=True, slots=True)
class MiniMaxM3Config:
    """`sparse` and `routed` say of each layer whether it has an indexer and whether it has experts; `indexer`
    and `experts` are there where a layer has one."""

    sizes: Sizes
    rotary: Rotary
    rms_eps: float
    sparse: tuple[bool, ...]
    routed: tuple[bool, ...]
    indexer: IndexerSizes | None
    experts: ExpertSizes | None
    dense_inner: int
    alpha: float
    limit: float
    tied: bool


def read_config(fields: Fields, n_ctx: int) -> MiniMaxM3Config:
    """Raises WeightsRefused."""
    for name, value in _ONLY.items():
        fields.only(name, value, value)
    fields.word("hidden_act", ("silu", "swigluoai"), "silu")
    sizes = read_sizes(fields)
    sparse, routed = _sparse_layers(fields, sizes.num_layers), _routed_layers(fields, sizes.num_layers)
    rotary = _rotary(fields, sizes.head_size, n_ctx)
    return MiniMaxM3Config(
        sizes=sizes,
        rotary=rotary,
        rms_eps=fields.number("rms_norm_eps"),
        sparse=sparse,
        routed=routed,
        indexer=_indexer(fields, sizes, rotary) if any(sparse) else None,
        experts=_experts(fields) if any(routed) else None,
        dense_inner=0 if all(routed) else fields.count("dense_intermediate_size"),
        alpha=fields.number("swiglu_alpha", 1.702),
        limit=fields.number("swiglu_limit", 7.0),
        tied=fields.flag("tie_word_embeddings", False),
    )


def needs_of(config: MiniMaxM3Config) -> MemoryNeeds:
    """Index keys are plain where rows are floats. Quantized, they are rotated as keys are: it spreads what a
    block's scale would cut off, and leaves the products as they are."""
    sizes, parts = config.sizes, list[PartNeed]()
    for layer, sparse in enumerate(config.sparse):
        size = sizes.head_size
        parts += keys_and_values(layer, sizes.num_kv_heads, size, size, config.rotary)
        if sparse and config.indexer is not None:
            parts.append(RowsSpec(INDEX, layer, 1, config.indexer.size, turned=Turned(config.rotary)))
    return MemoryNeeds("msa" if any(config.sparse) else "kv", tuple(parts))


#: what the engine does not have otherwise
_ONLY: Mapping[str, Value] = {
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "scoring_func": "sigmoid",
    "attention_bias": False,
    "attention_output_gate": False,
    "use_routing_bias": True,
    "n_shared_experts": 1,
}


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    if fields.has("layer_types"):
        return tuple(kind == _SPARSE for kind in fields.words("layer_types", num_layers, (FULL, _SPARSE)))
    section = fields.section("sparse_attention_config")
    if section.has("sparse_attention_freq"):
        return _switches(section, "sparse_attention_freq", num_layers)
    return (False,) * num_layers


def _routed_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    if fields.has("mlp_layer_types"):
        return tuple(k == "sparse" for k in fields.words("mlp_layer_types", num_layers, ("dense", "sparse")))
    if fields.has("moe_layer_freq"):
        return _switches(fields, "moe_layer_freq", num_layers)
    return (True,) * num_layers


def _switches(fields: Fields, name: str, num_layers: int) -> tuple[bool, ...]:
    """A list that has 0 or 1 for each layer."""
    values = fields.counts(name, most=1)
    if len(values) != num_layers:
        raise fields.refused(name, list(values))
    return tuple(map(bool, values))


def _rotary(fields: Fields, head_size: int, n_ctx: int) -> Rotary:
    """`rotary_dim` values of a head turn. transformers takes no notice of that field and goes by
    partial_rotary_factor: where a file has both, they must agree."""
    n_rot = fields.count("rotary_dim", head_size)
    rotary = read_rope(fields, head_size, n_ctx, default_base=5e6, default_share=n_rot / head_size)
    if rotary.n_rot != n_rot:
        raise fields.refused("rotary_dim", n_rot)
    return rotary


def _indexer(fields: Fields, sizes: Sizes, rotary: Rotary) -> IndexerSizes:
    section = fields.section("sparse_attention_config")
    section.only("use_sparse_attention", True, True)
    section.only("sparse_init_block", 0, 0)
    section.only("sparse_score_type", "max", "max")

    def count(flat: str, nested: str, least: int = 1, most: int = MOST) -> int:
        """By either of its names; the checkpoint's own counts where there are both."""
        if section.has(nested):
            return section.count(nested, least=least, most=most)
        return fields.count(flat, least=least, most=most)

    # One index vector for each key-value head.
    groups = sizes.num_kv_heads
    count("index_n_heads", "sparse_num_index_heads", least=groups, most=groups)
    chosen = count("index_topk_blocks", "sparse_topk_blocks")
    return IndexerSizes(
        size=count("index_head_dim", "sparse_index_dim", least=rotary.n_rot),
        law=BlockLaw(
            size=count("index_block_size", "sparse_block_size"),
            chosen=chosen,
            local=count("index_local_blocks", "sparse_local_block", least=0, most=chosen),
        ),
    )


def _experts(fields: Fields) -> ExpertSizes:
    count = fields.count("num_local_experts")
    return ExpertSizes(
        count=count,
        num_chosen=fields.count("num_experts_per_tok", most=count),
        inner=fields.count("intermediate_size"),
        shared_inner=fields.count("shared_intermediate_size"),
        scale=fields.number("routed_scaling_factor", 2.0),
    )

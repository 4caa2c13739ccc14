"""DeepSeek-V4's configuration, under transformers' names and those of the hub's checkpoint, and what a model
of these sizes asks to be remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.cache.dsv4 import (
    HEAVY_KEYS,
    HEAVY_RING,
    INDEX_KEYS,
    INDEX_RING,
    SPARSE_KEYS,
    SPARSE_RING,
)
from engine.cache.memory import (
    KEYS,
    Basis,
    BlocksSpec,
    MemoryNeeds,
    PartNeed,
    PointSpec,
    RowsSpec,
    Turned,
    WindowSpec,
)
from engine.models.fields import Fields
from engine.models.hub_rope import rope_section, rope_type
from engine.models.sizes import Sizes, read_sizes
from engine.rope import RopeScaling, Rotary, build_rotary
from engine.state import Value

LayerKind = Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
SLIDING: LayerKind = "sliding_attention"
SPARSE: LayerKind = "compressed_sparse_attention"
HEAVY: LayerKind = "heavily_compressed_attention"

#: by tokens a block, which is all that the hub's checkpoint says of a layer; 0 is a layer without blocks
_BY_RATIO: Mapping[int, LayerKind] = {0: SLIDING, 4: SPARSE, 128: HEAVY}

#: what the engine does not have otherwise
_ONLY: Mapping[str, Value] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "topk_method": "noaux_tc",
}


@dataclass(frozen=True, slots=True)
class Compression:
    """`ratio` tokens make one row. `overlapping`: so do those of the block before, with half of their
    lines."""

    ratio: int
    overlapping: bool

    def width(self, size: int) -> int:
        """Of the lines of tokens, for rows of `size` values."""
        return 2 * size if self.overlapping else size

    def ring(self, size: int) -> tuple[int, int, int]:
        """Shape of the lines that must be kept."""
        return 2 * self.ratio if self.overlapping else self.ratio, 2, self.width(size)


@dataclass(frozen=True, slots=True)
class DeepSeekV4Config:
    """Sizes in values, counts; `kinds` has an entry for each layer, and so has `hashed`: layers whose experts
    go by the token's id."""

    sizes: Sizes
    kinds: tuple[LayerKind, ...]
    hashed: tuple[bool, ...]
    compressions: Mapping[LayerKind, Compression]
    rotaries: Mapping[LayerKind, Rotary]
    n_rot: int
    window: WindowSpec
    rms_eps: float
    q_rank: int
    o_groups: int
    o_rank: int
    index_heads: int
    index_size: int
    index_count: int
    num_streams: int
    iterations: int
    hyper_eps: float
    num_experts: int
    num_chosen: int
    expert_inner: int
    scoring: str
    expert_scale: float
    limit: float
    tied: bool


def read_config(fields: Fields, n_ctx: int) -> DeepSeekV4Config:
    """Raises WeightsRefused."""
    for name, value in _ONLY.items():
        fields.only(name, value, value)
    sizes = read_sizes(fields)
    kinds, compressions = _layers(fields, sizes.num_layers)
    n_rot = _num_rotated(fields, sizes.head_size)
    experts = fields.count("n_routed_experts")
    groups = fields.count("o_groups")
    if sizes.num_heads % groups:
        raise fields.refused("o_groups", groups)
    index_size = fields.count("index_head_dim", least=n_rot)
    if index_size % 2:  # its keys are stored Hadamard-rotated
        raise fields.refused("index_head_dim", index_size)
    return DeepSeekV4Config(
        sizes=sizes,
        kinds=kinds,
        hashed=_hashed(fields, sizes.num_layers),
        compressions=compressions,
        rotaries=_rotaries(fields, n_rot, n_ctx),
        n_rot=n_rot,
        window=WindowSpec(fields.count("sliding_window")),
        rms_eps=fields.number("rms_norm_eps"),
        q_rank=fields.count("q_lora_rank"),
        o_groups=groups,
        o_rank=fields.count("o_lora_rank"),
        index_heads=fields.count("index_n_heads"),
        index_size=index_size,
        index_count=fields.count("index_topk"),
        num_streams=fields.count("hc_mult", most=64),
        iterations=fields.count("hc_sinkhorn_iters", most=10_000),
        hyper_eps=fields.number("hc_eps"),
        num_experts=experts,
        num_chosen=fields.count("num_experts_per_tok", most=experts),
        expert_inner=fields.count("moe_intermediate_size"),
        scoring=fields.word("scoring_func", ("sqrtsoftplus", "sigmoid"), "sqrtsoftplus"),
        expert_scale=fields.number("routed_scaling_factor", 1.5),
        limit=fields.number("swiglu_limit", 10.0),
        tied=fields.flag("tie_word_embeddings", False),
    )


def needs_of(config: DeepSeekV4Config) -> MemoryNeeds:
    """Window rows in every layer, which are keys and values; beside them block rows and the lines that wait
    to become some. Index keys are always stored Hadamard-rotated."""
    parts: list[PartNeed] = []
    for layer, kind in enumerate(config.kinds):
        size, turned = config.sizes.head_size, Turned(config.rotaries[kind])
        parts.append(RowsSpec(KEYS, layer, 1, size, turned=turned, window=config.window, value_size=size))
        if kind == SLIDING:
            continue
        compression = config.compressions[kind]
        block, ring = compression.ratio, compression.ring(size)
        if kind == HEAVY:
            parts += (BlocksSpec(HEAVY_KEYS, layer, size, block), PointSpec(HEAVY_RING, layer, ring))
            continue
        index = config.index_size
        parts += (
            BlocksSpec(SPARSE_KEYS, layer, size, block),
            PointSpec(SPARSE_RING, layer, ring),
            BlocksSpec(INDEX_KEYS, layer, index, block, basis=Basis.ROTATED),
            PointSpec(INDEX_RING, layer, compression.ring(index)),
        )
    return MemoryNeeds("dsv4" if set(config.kinds) != {SLIDING} else "iswa", tuple(parts))


def _layers(fields: Fields, num_layers: int) -> tuple[tuple[LayerKind, ...], Mapping[LayerKind, Compression]]:
    """The kind of each layer, and how those with blocks compress. The checkpoint lists further layers behind,
    which predict more than one token; they are not part of this model."""
    kinds: tuple[LayerKind, ...]
    if fields.has("layer_types"):
        words = fields.words("layer_types", num_layers, (SLIDING, SPARSE, HEAVY))
        by_word: Mapping[str, LayerKind] = {kind: kind for kind in (SLIDING, SPARSE, HEAVY)}
        kinds = tuple(by_word[word] for word in words)
    else:
        ratios = fields.counts("compress_ratios")[:num_layers]
        strange = next((ratio for ratio in ratios if ratio not in _BY_RATIO), None)
        if strange is not None or len(ratios) < num_layers:
            raise fields.refused("compress_ratios", list(ratios) if strange is None else strange)
        kinds = tuple(_BY_RATIO[ratio] for ratio in ratios)
    rates = fields.section("compress_rates")
    sparse = rates.count(SPARSE, fields.count("compress_rate_csa", 4))
    heavy = rates.count(HEAVY, fields.count("compress_rate_hca", 128))
    return kinds, {SPARSE: Compression(sparse, True), HEAVY: Compression(heavy, False)}


def _hashed(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    if fields.has("mlp_layer_types"):
        return tuple(
            k == "hash_moe" for k in fields.words("mlp_layer_types", num_layers, ("hash_moe", "moe"))
        )
    num_hashed = fields.count("num_hash_layers", 3, least=0)
    return tuple(layer < num_hashed for layer in range(num_layers))


def _num_rotated(fields: Fields, head_size: int) -> int:
    """Values at the end of each head that RoPE turns."""
    share = fields.number("partial_rotary_factor", 64 / 512)
    n_rot = fields.count("qk_rope_head_dim", int(head_size * share), most=head_size)
    if n_rot % 2:
        raise fields.refused("qk_rope_head_dim", n_rot)
    return n_rot


def _rotaries(fields: Fields, n_rot: int, n_ctx: int) -> Mapping[LayerKind, Rotary]:
    """Layers without blocks have a base of their own, and no YaRN; in the others all that turns, turns
    alike."""
    rope = rope_section(fields, None)
    near, far = (rope.section(name) if rope.has(name) else None for name in ("main", "compress"))
    if near is None or far is None:
        base = fields.number("rope_theta", 10_000.0)
        far_base = fields.number("compress_rope_theta", 160_000.0)
        scaling = _scaling(rope)
    else:
        near.only("rope_type", "default", "default")
        base, far_base, scaling = near.number("rope_theta"), far.number("rope_theta"), _scaling(far)
    if base <= 0 or far_base <= 0:
        raise fields.refused("rope_theta", min(base, far_base))
    blocks = build_rotary(n_rot, far_base, scaling, n_ctx)
    return {SLIDING: build_rotary(n_rot, base, RopeScaling(), n_ctx), SPARSE: blocks, HEAVY: blocks}


def _scaling(rope: Fields) -> RopeScaling:
    """YaRN without its amplitude: values are not scaled with the context."""
    if rope_type(rope, ("default", "yarn")) == "default":
        return RopeScaling()
    rope.only("attention_factor", 1.0, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=rope.number("factor"),
        original_context=rope.count("original_max_position_embeddings"),
        attention_factor=1.0,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )

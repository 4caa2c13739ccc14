"""dots.3 Note, the text model: layers of latent attention that see everything and choose by an indexer, and
layers with a sliding window and sizes of their own. The key that turns has a norm, each head a gate, and
latents are stretched by sqrt(width / rank).

RoPE of the indexer is of consecutive values here, as in transformers 5.23 (`Dots3NoteTextIndexer`), which
this is tested against. llama.cpp turns halves: the two disagree, and only the released weights could tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.memory import MemoryNeeds, PartNeed, WindowSpec
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Block, Decoder
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope, rope_section, rope_type
from engine.models.loading import Loader, check_bias
from engine.models.mla import LatentSizes, latent_rows, load_latent_attention, stretching
from engine.models.mla_blocks import IndexedRun, load_block, load_ends
from engine.models.mla_ffn import load_biased_sigmoid, load_ffn, read_kinds
from engine.models.mla_indexer import INDEXED, IndexSizes, index_rows, load_indexer, read_index_sizes
from engine.models.sizes import FULL, SLIDING, Sizes, read_layer_types, read_sizes
from engine.rope import RopeScaling, Rotary, build_rotary


class Dots3Note(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes, eps = read_sizes(fields), fields.number("rms_norm_eps", 1e-5)
        kinds = _read_layer_types(fields, sizes.num_layers)
        latents = [_read_latent(fields, sizes, layer, kind) for layer, kind in enumerate(kinds)]
        rotaries = {kind: _read_rotary(fields, kinds, latents, kind, placement.n_ctx) for kind in set(kinds)}
        index = read_index_sizes(fields, latents[kinds.index(INDEXED)], pairs=True)
        window = WindowSpec(_either(fields, "sliding_window", "sliding_window_size"))

        parts: list[PartNeed] = []
        for layer, kind in enumerate(kinds):
            part_window = window if kind == SLIDING else None
            parts.append(latent_rows(layer, latents[layer], rotaries[kind], part_window))
            if kind == INDEXED:
                parts.append(index_rows(layer, index, rotaries[kind]))
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("dsa_iswa" if SLIDING in kinds else "dsa", tuple(parts)),
            rotaries=rotaries,
            ends=load_ends(load, fields, sizes, eps),
            blocks=_blocks(load, fields, eps, kinds, latents, index),
        )


def _blocks(
    load: Loader,
    fields: Fields,
    eps: float,
    kinds: Sequence[str],
    latents: Sequence[LatentSizes],
    index: IndexSizes,
) -> list[Block]:
    fields.only("mlp_bias", False, False)
    ffn_kinds = read_kinds(fields, len(kinds))
    shared = _either(fields, "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size")
    blocks: list[Block] = []
    for layer, (kind, latent, ffn_kind) in enumerate(zip(kinds, latents, ffn_kinds, strict=True)):
        prefix, name = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        check_bias(load, fields, f"{name}.kv_a_proj_with_mqa", False)
        gains, scale = stretching(latent), float(latent.head**-0.5)
        attention = load_latent_attention(load, name, layer, latent, scale, eps, gains)
        ffn = load_ffn(load, fields, f"{prefix}.mlp", latent.width, ffn_kind, load_biased_sigmoid, shared)
        block = load_block(load, prefix, kind, latent.width, eps, attention, ffn)
        if kind == INDEXED:
            blocks.append(IndexedRun(load_indexer(load, f"{name}.indexer", layer, index), block))
        else:
            blocks.append(block)
    return blocks


# -- the configuration, as released files have it and as transformers writes it ---------------------------


def _read_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Released files call indexed layers full ones, and say nothing where the pattern is their own."""
    indexed = INDEXED if fields.has("per_layer_config") else FULL
    pattern = tuple(indexed if layer < 2 or layer % 4 == 1 else SLIDING for layer in range(num_layers))
    fields.only("use_dsa", True, True)
    fields.only("use_sliding_window", True, True)
    given = read_layer_types(fields, (INDEXED, indexed, SLIDING), pattern)
    kinds = tuple(SLIDING if kind == SLIDING else INDEXED for kind in given)
    if INDEXED not in kinds:
        raise fields.refused("layer_types", SLIDING)
    return kinds


def _read_latent(fields: Fields, sizes: Sizes, layer: int, kind: str) -> LatentSizes:
    """What a layer says of itself, or the file of all its sliding layers, or of all."""
    own = fields.section("per_layer_config").section(str(layer))
    sliding = kind == SLIDING and not fields.has("per_layer_config")

    def count(name: str) -> int:
        if own.has(name):
            return own.count(name)
        return fields.count(f"swa_{name}" if sliding else name)

    num_heads, nope = count("num_attention_heads"), count("qk_nope_head_dim")
    if count("num_key_value_heads") != num_heads:
        raise fields.refused("num_key_value_heads", count("num_key_value_heads"))
    if sliding and not fields.has("swa_qk_rope_head_dim"):
        rope = count("head_dim") - nope
    else:
        rope = count("qk_rope_head_dim")
    if rope <= 0 or rope % 2:
        raise fields.refused("qk_rope_head_dim", rope)
    return LatentSizes(
        width=sizes.width,
        num_heads=num_heads,
        q_rank=count("q_lora_rank"),
        kv_rank=count("kv_lora_rank"),
        nope=nope,
        rope=rope,
        value=count("v_head_dim"),
    )


def _read_rotary(
    fields: Fields, kinds: Sequence[str], latents: Sequence[LatentSizes], kind: str, n_ctx: int
) -> Rotary:
    """The rotary of all layers of one kind. Stretched frequencies are refused: what they would mean for the
    scale of scores no file says."""
    ropes = {latent.rope for latent, of in zip(latents, kinds, strict=True) if of == kind}
    rope = min(ropes)
    if len(ropes) > 1:
        raise fields.refused("qk_rope_head_dim", sorted(ropes))
    if not fields.has("rope_parameters"):
        fields.only("rope_scaling", None)
        name, base = ("swa_rope_theta", 50_000.0) if kind == SLIDING else ("rope_theta", 80_000_000.0)
        return build_rotary(rope, fields.number(name, base), RopeScaling(), n_ctx)
    section = rope_section(fields, kind)
    rope_type(section, ("default",))
    # A share of head_dim, which for indexed layers is no size of anything; it comes out at `rope`.
    own = fields.section("per_layer_config").section(str(list(kinds).index(kind)))
    head = own.count("head_dim", fields.count("head_dim"))
    rotary = read_rope(fields, head, n_ctx, kind, default_share=rope / head)
    if rotary.n_rot != rope:
        raise section.refused("partial_rotary_factor", rotary.n_rot)
    return rotary


def _either(fields: Fields, name: str, older: str) -> int:
    return fields.count(older if fields.has(older) and not fields.has(name) else name)

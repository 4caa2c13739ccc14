"""What RoPE a layer has by a hub's configuration: `rope_parameters`, or `rope_scaling` in older files."""

from __future__ import annotations

import math

import torch

from engine.models.fields import Fields
from engine.rope import RopeScaling, Rotary, build_rotary

#: rope_type, and the older `type`, in the words of `engine.rope`
_KINDS = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


#: The share of pairs that turn do so as slowly as they would if all did, and the others stand still.
PROPORTIONAL = "proportional"


def read_rope(
    fields: Fields,
    head_size: int,
    n_ctx: int,
    layer_type: str | None = None,
    default_base: float = 10_000.0,
    default_share: float = 1.0,
    base_field: str = "rope_theta",
) -> Rotary:
    """The rotary of heads of `head_size` values; `layer_type` where kinds of layers have RoPE of their own.

    `default_share` of a head turns where the file does not say partial_rotary_factor. `base_field` is where
    older files have the base. Raises WeightsRefused.
    """
    rope = rope_section(fields, layer_type)
    base = rope.positive("rope_theta", fields.positive(base_field, default_base))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", default_share))
    if rope.has("rope_type") and rope_type(rope, (*_KINDS, PROPORTIONAL)) == PROPORTIONAL:
        return _proportional(rope, head_size, base, share)
    n_rot = int(head_size * share)
    if not 0 < n_rot <= head_size or n_rot % 2:
        if share == 1.0:
            raise fields.refused("head_dim", head_size)
        raise rope.refused("partial_rotary_factor", share)
    return build_rotary(n_rot, base, _scaling(fields, rope, n_rot, n_ctx), n_ctx)


def _proportional(rope: Fields, head_size: int, base: float, share: float) -> Rotary:
    turning = int(share * head_size // 2)
    if head_size % 2 or not 0 < turning <= head_size // 2:
        raise rope.refused("partial_rotary_factor", share)
    steps = torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / head_size
    inv_freq = torch.zeros(head_size // 2)
    inv_freq[:turning] = 1.0 / base**steps
    return Rotary(inv_freq / rope.positive("factor", 1.0))


def rope_section(fields: Fields, layer_type: str | None) -> Fields:
    """What is said of the layers of one type; of all where the file makes no difference."""
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    return rope.section(layer_type) if layer_type is not None and rope.has(layer_type) else rope


def rope_type(rope: Fields, allowed: tuple[str, ...]) -> str:
    """One of `allowed`; older files say it as `type`."""
    if not rope.has("rope_type") and rope.has("type"):
        return rope.word("type", allowed)
    return rope.word("rope_type", allowed, "default")


def _scaling(fields: Fields, rope: Fields, n_rot: int, n_ctx: int) -> RopeScaling:
    kind = _KINDS[rope_type(rope, tuple(_KINDS))]
    if kind == "none":
        return RopeScaling()
    longest = fields.count("max_position_embeddings")
    name = "original_max_position_embeddings"
    # The two tables of longrope mean nothing without the length that parts them.
    default = None if kind == "longrope" else longest
    original = rope.count(name) if rope.has(name) else fields.count(name, default)
    ratio = longest / original if kind in ("yarn", "longrope") else None
    factor = rope.positive("factor", ratio)
    factors = None
    if kind == "longrope":
        table = "long_factor" if n_ctx > original else "short_factor"
        factors = torch.tensor(rope.numbers(table))
        if len(factors) != n_rot // 2 or not bool((factors > 0).all()):
            raise rope.refused(table, factors.tolist())
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        factors=factors,
        attention_factor=_attention_factor(rope, kind, factor),
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        whole_pairs=rope.flag("truncate", True),
    )


def _attention_factor(rope: Fields, kind: str, factor: float) -> float | None:
    if rope.has("attention_factor"):
        return rope.positive("attention_factor")
    over, under = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if kind != "yarn" or not over or not under:
        return None
    return yarn_magnitude(factor, over) / yarn_magnitude(factor, under)


def yarn_magnitude(factor: float, by: float = 1.0) -> float:
    """YaRN (Peng et al. 2023), section 3.4: how much longer rotated values are for a context that is
    `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

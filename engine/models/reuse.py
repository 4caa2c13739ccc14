"""Layers that keep no rows of their own and read those of a layer before them."""

from __future__ import annotations

from engine.models.fields import Fields


def read_sources(fields: Fields, kinds: tuple[str, ...], default: int) -> tuple[int, ...]:
    """For each layer the one whose rows it reads: itself, or for the last `num_kv_shared_layers` the last of
    its kind before them. Raises WeightsRefused where there is none."""
    num_shared = fields.count("num_kv_shared_layers", default, least=0, most=len(kinds) - 1)
    own = len(kinds) - num_shared
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if not set(kinds) <= set(last):
        raise fields.refused("num_kv_shared_layers", num_shared)
    return tuple(layer if layer < own else last[kind] for layer, kind in enumerate(kinds))

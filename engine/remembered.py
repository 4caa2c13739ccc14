"""What a model's memory is made of, for who brings rows in or takes them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.memory import MemoryNeeds, PointSpec
from engine.cache.parts import part_name, rotated_block
from engine.models.base import Model
from engine.state import Layout


@dataclass(frozen=True, slots=True)
class Remembered:
    """`needs` are what the model declares, `layout` how its rows are stored; `rotated` says of parts that
    are stored Hadamard-rotated how many values of a row are rotated together, by the part's name in the
    layout."""

    vocab_size: int
    needs: MemoryNeeds
    layout: Layout
    rotated: Mapping[str, int]


def remembered(model: Model, layout: Layout) -> Remembered:
    dtypes = {spec.name: spec.dtype for spec in layout}
    blocks = {
        part_name(need): rotated_block(need, dtypes[part_name(need)])
        for need in model.needs.parts
        if not isinstance(need, PointSpec)
    }
    rotated = {name: block for name, block in blocks.items() if block}
    return Remembered(model.vocab_size, model.needs, layout, rotated)

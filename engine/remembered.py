"""What a model's memory is made of, for who brings rows in or takes them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.memory import MemoryNeeds, PointSpec
from engine.cache.parts import layout_of, part_name, rotated_block
from engine.errors import Unsupported
from engine.fingerprint import is_of_rows, row_meaning
from engine.models.base import Model
from engine.state import Layout, Value


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
    """Raises Unsupported for a model that brings a memory of its own."""
    _check_declared(model.needs)
    return Remembered(model.vocab_size, model.needs, layout, _rotated(model.needs, layout))


@dataclass(frozen=True, slots=True)
class MemoryForm:
    """A model's memory with rows of two dtypes: its layout, the whole meaning that its states' fingerprint
    has then, and of parts that are stored Hadamard-rotated how many values are rotated together, by name."""

    layout: Layout
    meaning: Mapping[str, Value]
    rotated: Mapping[str, int]


def memory_form(needs: MemoryNeeds, meaning: Mapping[str, Value], type_k: str, type_v: str) -> MemoryForm:
    """`meaning` is that of the same model's states with rows of any dtypes. Raises ConfigError for a dtype
    that rows cannot be stored as, Unsupported for a model that brings a memory of its own."""
    _check_declared(needs)
    layout = layout_of(needs.parts, type_k, type_v)
    blocks = _rotated(needs, layout)
    names = {name.rpartition(".")[0] for name in blocks}
    others = {field: value for field, value in meaning.items() if not is_of_rows(field)}
    return MemoryForm(layout, {**others, **row_meaning(needs, names, type_k, type_v)}, blocks)


def _check_declared(needs: MemoryNeeds) -> None:
    if not needs.parts:
        raise Unsupported(
            f"the model's memory is {needs.kind}: its rows are of another library's making, and are neither "
            "brought in from elsewhere nor made anew"
        )


def _rotated(needs: MemoryNeeds, layout: Layout) -> dict[str, int]:
    dtypes = {spec.name: spec.dtype for spec in layout}
    blocks = {
        part_name(need): rotated_block(need, dtypes[part_name(need)])
        for need in needs.parts
        if not isinstance(need, PointSpec)
    }
    return {name: block for name, block in blocks.items() if block}

"""Stored states to be re-encoded, and forms of a memory whose rows are real numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.state import (
    Fingerprint,
    Layout,
    PartKind,
    PartSpec,
    Point,
    Provenance,
    Rows,
    SequenceState,
    Span,
    Value,
    parts_of,
)
from serialization.manifest import Manifest
from serialization.pipelines import DEFAULT, CodecSet
from serialization.snapshot import write_state
from serialization.values import encode
from tests.serialization.states import CountingStore, manifest_of, state_of

#: what a memory has of each kind: K and V of 2 heads of 64, a window of 100, blocks of 48, and point state
HEAD = 64


@dataclass(frozen=True, slots=True)
class Form:
    """As an engine says it."""

    layout: Layout
    meaning: Mapping[str, Value]
    rotated: Mapping[str, int]


def form(type_k: str, type_v: str) -> Form:
    """Quantized keys are rotated by 64, quantized values by 32 (as if their heads were so small)."""
    layout = (
        PartSpec("kv.k.00", PartKind.TOKEN, 0, type_k, (2, HEAD)),
        PartSpec("kv.v.00", PartKind.TOKEN, 0, type_v, (2, HEAD)),
        PartSpec("pool.k.00", PartKind.BLOCK, 0, type_k, (HEAD,), block=48),
        PartSpec("kv.k.01", PartKind.WINDOW, 1, type_k, (2, HEAD), window=100),
        PartSpec("kv.v.01", PartKind.WINDOW, 1, type_v, (2, HEAD), window=100),
        PartSpec("conv.01", PartKind.POINT, 1, "f32", (3,)),
    )
    rotated = {spec.name: 64 if ".k." in spec.name else 32 for spec in layout if spec.dtype.startswith("q")}
    return Form(layout, {"model": "b3-00", "type_k": type_k, "type_v": type_v}, rotated)


def numbers(spec: PartSpec, start: int, stop: int) -> torch.Tensor:
    """uint8 rows of ordinary numbers, a function of their place."""
    values = spec.num_values
    index = torch.arange(start * values, stop * values, dtype=torch.float64)
    wave = torch.sin(index * 12.9898 + spec.layer + len(spec.name)) * 437.58
    drawn = ((wave - wave.floor()) * 4 - 2).float().view(stop - start, values)
    return encode(spec.dtype, drawn)


def state(length: int, type_k: str = "bf16", type_v: str = "bf16", window_start: int = 0) -> SequenceState:
    """A state of `form`, with window rows from `window_start` on."""
    made = form(type_k, type_v)
    rows = []
    for kind in (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW):
        start = min(window_start, length) if kind is PartKind.WINDOW else 0
        parts = tuple(
            numbers(spec, start // spec.block, length // spec.block) for spec in parts_of(made.layout, kind)
        )
        if start < length:
            rows.append(Rows(kind, start, length, parts))
    points = tuple(
        Point(at, (torch.full((12,), at % 251, dtype=torch.uint8),)) for at in range(50, length + 1, 50)
    )
    plain = state_of(length, ())
    return replace(
        plain,
        layout=made.layout,
        fingerprint=Fingerprint(made.meaning, {"torch": "2.13"}),
        rows=tuple(rows),
        points=points,
        spans=(Span(0, length, Provenance.COMPUTED),) if length else (),
    )


def stored(source: SequenceState, store: CountingStore, codecs: CodecSet = DEFAULT) -> Manifest:
    """The manifest of a state that was put into `store`."""
    manifest = manifest_of(source, write_state(store, source, None, 0, codecs))
    return replace(manifest, fingerprint=source.fingerprint)


def rows_of(found: SequenceState, kind: PartKind) -> tuple[torch.Tensor, ...]:
    """All rows of one kind, part by part."""
    runs = found.rows_of(kind)
    return tuple(torch.cat(parts) for parts in zip(*(run.parts for run in runs), strict=True))

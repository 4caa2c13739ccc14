"""Synthetic states of all four kinds of part, and a store that counts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from engine.state import (
    DraftState,
    Edge,
    Fingerprint,
    Layout,
    NextLogits,
    PartKind,
    PartSpec,
    Pending,
    Point,
    Provenance,
    Rows,
    SamplerParams,
    SequenceState,
    Span,
    parts_of,
)
from serialization.blobs import BlobClass, BlobId, Bytes, verify_blob
from serialization.buffers import NEW, Buffers
from serialization.manifest import Manifest, ManifestKind
from serialization.snapshot import WrittenState
from sessions.stores.memory import MemoryStore

#: token, block (4 and 128 tokens), window (16 and 300 tokens) and point parts, of mixed dtypes
FOUR_KINDS: Layout = (
    PartSpec("k", PartKind.TOKEN, 0, "bf16", (2, 8)),
    PartSpec("v", PartKind.TOKEN, 0, "q8_0", (1, 32)),
    PartSpec("k", PartKind.TOKEN, 3, "bf16", (2, 8)),
    PartSpec("c4", PartKind.BLOCK, 1, "f16", (6,), block=4),
    PartSpec("c128", PartKind.BLOCK, 1, "f32", (4,), block=128),
    PartSpec("k", PartKind.WINDOW, 2, "bf16", (1, 4), window=16),
    PartSpec("k", PartKind.WINDOW, 4, "q4_0", (32,), window=300),
    PartSpec("conv", PartKind.POINT, 5, "f32", (3, 4)),
    PartSpec("ids", PartKind.POINT, 5, "i64", (3,)),
)
ATTENTION: Layout = parts_of(FOUR_KINDS, PartKind.TOKEN)
WINDOWED: Layout = FOUR_KINDS[:3] + FOUR_KINDS[5:7]
MEANING = Fingerprint({"model": "b3-00", "layers": 6, "rope": 1e4}, {"torch": "2.13"})


#: what a drafter's memory may be like, beside that of the target
DRAFTED: Layout = (
    PartSpec("k", PartKind.TOKEN, 0, "f32", (3,)),
    PartSpec("c16", PartKind.BLOCK, 0, "bf16", (4,), block=16),
    PartSpec("k", PartKind.WINDOW, 1, "bf16", (2, 4), window=40),
    PartSpec("conv", PartKind.POINT, 2, "f32", (5,)),
)
DRAFTER = Fingerprint({"model": "b3-11", "layers": 3}, {"torch": "2.13"})

PENDING = Pending(5)


class CountingStore(MemoryStore):
    """Counts and remembers what is asked of it. `faults`: the bytes a broken disk gives back for a blob."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[BlobId, bytes] = {}
        self.num_puts = 0
        self.got: list[BlobId] = []

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        self.num_puts += 1
        return super().put(cls, data)

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        self.got.append(blob)
        if blob in self.faults:
            verify_blob(blob, self.faults[blob])
        return super().get(blob, buffers)

    def blobs(self) -> set[BlobId]:
        return {info.blob for info in self.list_blobs()}


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """The first `length` ids of an endless text."""
    return tuple((7 * index + 31 * seed + index * index) % 49_152 for index in range(length))


def row_bytes(spec: PartSpec, start: int, stop: int, seed: int = 0) -> torch.Tensor:
    """uint8 [stop - start, row_nbytes]: rows that are a function of their index, part and seed alone."""
    index = torch.arange(start, stop, dtype=torch.int64)[:, None]
    column = torch.arange(spec.row_nbytes, dtype=torch.int64)[None, :]
    mixed = index * 2_654_435_761 + column * 40_503 + spec.layer * 97 + len(spec.name) + seed * 1_000_003
    return ((mixed ^ (mixed >> 13)) % 251).to(torch.uint8)


def rows_for(layout: Layout, kind: PartKind, start: int, stop: int, seed: int = 0) -> Rows:
    """The run of one kind for tokens [start, stop)."""
    parts = tuple(
        row_bytes(spec, start // spec.block, stop // spec.block, seed) for spec in parts_of(layout, kind)
    )
    return Rows(kind, start, stop, parts)


def state_of(
    length: int,
    layout: Layout = FOUR_KINDS,
    since: int = 0,
    window_start: int = 0,
    seed: int = 0,
    edge: Edge = PENDING,
    spans: tuple[Span, ...] | None = None,
) -> SequenceState:
    """What an engine's snapshot `since` a position gives; window rows from `window_start` on at most."""
    rows = []
    for kind in (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW):
        start = max(since, window_start) if kind is PartKind.WINDOW else since
        if parts_of(layout, kind) and start < length:
            rows.append(rows_for(layout, kind, start, length, seed))
    specs = parts_of(layout, PartKind.POINT)
    point = Point(length, tuple(row_bytes(spec, length, length + 1, seed)[0] for spec in specs))
    computed = (Span(0, length, Provenance.COMPUTED),) if length else ()
    return SequenceState(
        layout=layout,
        fingerprint=MEANING,
        tokens=tokens_of(length),
        rows=tuple(rows),
        points=(point,) if specs else (),
        spans=computed if spans is None else spans,
        edge=edge if length else None,
        sampler=SamplerParams(temperature=0.7, seed=2**64 - 1, logit_bias=((3, -1.5),)),
    )


def drafted(
    state: SequenceState,
    length: int | None = None,
    layout: Layout = DRAFTED,
    since: int = 0,
    window_start: int = 0,
    seed: int = 9,
    ahead: int = 0,
) -> SequenceState:
    """The state with a draft of its first `length` tokens, rows from `since` on."""
    length = state.length if length is None else length
    of = state_of(length, layout, since, window_start, seed)
    return replace(state, draft=DraftState(DRAFTER, layout, length, of.rows, of.points, ahead))


EMPTY = Manifest(
    session="01ARZ3NDEKTSV4RRFFQ69G5FAV",
    tenant="default",
    name=None,
    title="",
    kind=ManifestKind.TURN,
    pin=None,
    generation=0,
    parent=None,
    forked_from=None,
    created=1.5,
    updated=1.5,
    model="test",
    fingerprint=MEANING,
    template=None,
    layout=(),
    tokens=(),
    messages=(),
    spans=(),
    chunks=(),
    checkpoints=(),
    edge=None,
    sampler=SamplerParams(),
)


def manifest_of(state: SequenceState, written: WrittenState) -> Manifest:
    return replace(
        EMPTY,
        layout=state.layout,
        tokens=state.tokens,
        spans=state.spans,
        chunks=written.chunks,
        checkpoints=written.checkpoints,
        edge=written.edge,
        sampler=state.sampler,
        draft=written.draft,
    )


def expect_rows(state: SequenceState | DraftState, length: int, seed: int = 0) -> None:
    """Asserts that the state has every row that a resume at `length` needs, each with its right bytes."""
    for kind in (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW):
        specs = parts_of(state.layout, kind)
        runs = [run for run in state.rows if run.kind is kind]
        if not specs or not length:
            continue
        window = max((spec.window or 0 for spec in specs), default=0)
        assert runs[0].start <= (max(0, length - window) if kind is PartKind.WINDOW else 0)
        assert runs[-1].stop == length
        assert all(left.stop == right.start for left, right in itertools.pairwise(runs))
        for run in runs:
            for part, spec in zip(run.parts, specs, strict=True):
                wanted = row_bytes(spec, run.start // spec.block, run.stop // spec.block, seed)
                assert part.shape == wanted.shape
                assert torch.equal(part, wanted)


def expect_draft(state: SequenceState, length: int, layout: Layout = DRAFTED, seed: int = 9) -> None:
    """Asserts that the state has the draft of its first `length` tokens, whole, with its right bytes."""
    draft = state.draft
    assert draft is not None
    assert (draft.fingerprint, draft.layout, draft.length) == (DRAFTER, layout, length)
    expect_rows(draft, length, seed)
    specs = parts_of(layout, PartKind.POINT)
    assert [point.position for point in draft.points] == ([length] if specs else [])
    for point in draft.points:
        for spec, part in zip(specs, point.parts, strict=True):
            assert torch.equal(part, row_bytes(spec, length, length + 1, seed)[0])


def logits_edge() -> NextLogits:
    return NextLogits(torch.linspace(-3, 3, 50))

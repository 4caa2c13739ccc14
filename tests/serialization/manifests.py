"""Hypothesis strategies of manifests that keep every rule of the format."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from engine.state import (
    Canary,
    Fingerprint,
    PartKind,
    PartSpec,
    Pending,
    Provenance,
    SamplerParams,
    Span,
    parts_of,
)
from serialization.blobs import BlobClass, BlobId
from serialization.brought import Brought, Proven
from serialization.chunks import CHUNK_SIZES
from serialization.drafts import StoredDraft
from serialization.losses import Loss, PartLoss
from serialization.manifest import Manifest, ManifestKind, Message, Origin
from serialization.refs import ROW_KINDS, BlobRef, Checkpoint, ChunkBlob, ChunkRef, StoredLogits
from serialization.replies import KeptReply
from tests.serialization.states import ATTENTION, FOUR_KINDS, WINDOWED

ULIDS = st.from_regex(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
REALS = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.integers(0, 2**32 - 1)


def blob_ids(cls: BlobClass) -> st.SearchStrategy[BlobId]:
    return st.binary(min_size=32, max_size=32).map(lambda digest: BlobId(f"{cls}-b3-{digest.hex()}"))


def blob_refs(cls: BlobClass) -> st.SearchStrategy[BlobRef]:
    return st.builds(BlobRef, blob_ids(cls), st.integers(0, 2**30), st.integers(0, 2**28))


SAMPLERS = st.builds(
    SamplerParams,
    temperature=st.floats(0, 9),
    top_k=st.integers(0, 99),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repeat_penalty=st.floats(0.5, 2),
    presence_penalty=REALS,
    frequency_penalty=REALS,
    penalty_last_n=st.integers(0, 512),
    logit_bias=st.lists(st.tuples(IDS, st.floats(allow_nan=False, max_value=1e30)), max_size=3).map(tuple),
    seed=st.integers(0, 2**64 - 1),
)
HALVES = st.dictionaries(
    st.text(st.characters(codec="ascii"), max_size=9),
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | REALS | TEXTS,
    max_size=4,
)


@st.composite
def canaries(draw: st.DrawFn, length: int) -> Canary:
    pairs = draw(st.lists(st.tuples(IDS, REALS), max_size=4))
    ids, logits = tuple(token for token, _ in pairs), tuple(logit for _, logit in pairs)
    return Canary(draw(st.integers(0, length)), ids, logits)


@st.composite
def chunk_refs(draw: st.DrawFn, length: int, chunk_tokens: int) -> tuple[ChunkRef, ...]:
    chunks = []
    last = max(0, length - 1) // chunk_tokens * chunk_tokens
    ends = st.integers(length, last + chunk_tokens) if length else st.just(0)
    pieces = st.sets(st.integers(last + 1, length - 1), max_size=3) if length > last + 1 else st.just(set())
    bounds = [*range(0, last + 1, chunk_tokens), *sorted(draw(pieces)), draw(ends)]
    for start, stop in itertools.pairwise(bounds if length else []):
        blobs = []
        for kind in draw(st.sets(st.sampled_from(ROW_KINDS))):
            first = draw(st.integers(start, stop - 1)) if kind is PartKind.WINDOW else start
            blobs.append(ChunkBlob(kind, first, draw(blob_refs(BlobClass.ROWS))))
        blobs.sort(key=lambda blob: ROW_KINDS.index(blob.kind))
        chunks.append(ChunkRef(start, stop, tuple(blobs)))
    return tuple(chunks)


@st.composite
def span_lists(draw: st.DrawFn, length: int) -> tuple[Span, ...]:
    cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    spans: list[Span] = []
    for start, stop in pairwise(cuts):
        taken = spans[-1].provenance if spans else None
        spans.append(Span(start, stop, draw(st.sampled_from([each for each in Provenance if each != taken]))))
    return tuple(spans)


@st.composite
def message_lists(draw: st.DrawFn, end: int) -> tuple[Message, ...]:
    edges = sorted(draw(st.lists(st.integers(0, end), max_size=8)))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    return tuple(Message(draw(TEXTS), draw(TEXTS), start, stop) for start, stop in pairs)


REAL = st.floats(0, 1e6)
BROUGHT = st.builds(Brought, TEXTS, st.just(Proven.ROWS), REAL, REAL) | st.builds(
    Brought, TEXTS, st.sampled_from([Proven.REREAD, Proven.UNVERIFIED]), REAL
)


@st.composite
def kept_replies(draw: st.DrawFn, num_messages: int) -> tuple[KeptReply, ...]:
    places = draw(st.sets(st.integers(0, num_messages - 1), max_size=4)) if num_messages else set()
    digests = st.binary(min_size=16, max_size=16)
    keys = draw(st.lists(digests, min_size=len(places), max_size=len(places), unique=True))
    return tuple(
        KeptReply(key, draw(digests), draw(st.integers(0, 2**64 - 1)), place, draw(TEXTS))
        for key, place in zip(keys, sorted(places), strict=True)
    )


@st.composite
def checkpoint_lists(draw: st.DrawFn, length: int, layout: tuple[PartSpec, ...]) -> tuple[Checkpoint, ...]:
    has_points = bool(parts_of(layout, PartKind.POINT))
    return tuple(
        Checkpoint(position, draw(blob_refs(BlobClass.POINT)) if has_points else None)
        for position in sorted(draw(st.sets(st.integers(0, length), max_size=3)))
    )


LAYOUTS: st.SearchStrategy[tuple[PartSpec, ...]] = st.sampled_from([(), ATTENTION, WINDOWED, FOUR_KINDS])


@st.composite
def drafts(draw: st.DrawFn, num_tokens: int, chunk_tokens: int) -> StoredDraft:
    layout, length = draw(LAYOUTS), draw(st.integers(1, num_tokens))
    made_with, ahead = Fingerprint(draw(HALVES), draw(HALVES)), draw(st.integers(0, num_tokens - length))
    return StoredDraft(
        made_with,
        layout,
        length,
        draw(chunk_refs(length, chunk_tokens)),
        draw(checkpoint_lists(length, layout)),
        ahead,
        chunk_tokens,
    )


@st.composite
def losses(draw: st.DrawFn) -> tuple[Loss, ...]:
    dtypes = st.sampled_from(["f32", "bf16", "q4_0"])
    sizes = st.floats(1e-9, 9)
    parts = st.builds(PartLoss, TEXTS, st.integers(0, 99), dtypes, dtypes, sizes, sizes)
    exact = st.builds(PartLoss, TEXTS, st.integers(0, 99), dtypes, dtypes, st.just(0.0), st.just(0.0))
    each = st.lists(parts | exact, min_size=1, max_size=3).map(tuple)
    return tuple(draw(st.lists(st.builds(Loss, st.integers(0, 2**24), each), max_size=2)))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    layout, chunk_tokens = draw(LAYOUTS), draw(st.sampled_from(CHUNK_SIZES))
    length = draw(st.sampled_from([0, 1, 255, 256, 257, 700]))
    largest = draw(st.sampled_from([10, 2**16 - 1, 2**16, 2**24, 2**32 - 1]))
    tokens = tuple(draw(st.lists(st.integers(0, largest), min_size=length, max_size=length)))
    edges: st.SearchStrategy[Any] = IDS.map(Pending) | blob_refs(BlobClass.POINT).map(StoredLogits)
    edge = draw(edges if length else edges | st.none())
    kind = draw(st.sampled_from(ManifestKind))
    messages = draw(message_lists(length + isinstance(edge, Pending)))
    return Manifest(
        session=draw(ULIDS),
        tenant=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)),
        name=draw(st.none() | TEXTS),
        title=draw(TEXTS),
        kind=kind,
        pin=draw(TEXTS) if kind is ManifestKind.PIN else None,
        generation=draw(st.integers(0, 2**64 - 1)),
        parent=draw(st.none() | blob_ids(BlobClass.MANIFEST)),
        forked_from=draw(
            st.none() | st.builds(Origin, ULIDS, blob_ids(BlobClass.MANIFEST), st.integers(0, 2**24))
        ),
        created=draw(st.floats(0, 1e12)),
        updated=draw(st.floats(0, 1e12)),
        model=draw(TEXTS),
        fingerprint=Fingerprint(draw(HALVES), draw(HALVES)),
        template=draw(st.none() | TEXTS),
        layout=layout,
        tokens=tokens,
        messages=messages,
        spans=draw(span_lists(length)),
        chunks=draw(chunk_refs(length, chunk_tokens)),
        checkpoints=draw(checkpoint_lists(length, layout)),
        edge=edge,
        sampler=draw(SAMPLERS),
        canary=draw(st.none() | canaries(length)),
        draft=draw(st.none() | drafts(length, chunk_tokens)) if length else None,
        note=draw(st.none() | TEXTS),
        salt=draw(st.none() | st.from_regex(r"b3-[0-9a-f]{64}", fullmatch=True)),
        replies=draw(kept_replies(len(messages))),
        chunk_tokens=chunk_tokens,
        reencoded=draw(losses()),
        brought=draw(st.none() | BROUGHT),
    )

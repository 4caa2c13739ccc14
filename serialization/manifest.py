"""The manifest: what a session is, by reference to blobs (docs/format.md, section 5).

A manifest is small, canonical and complete: token ids, messages, where the rows are, the edge, the sampler,
the fingerprint, and enough about its session that refs can be rebuilt from manifests alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from engine.errors import Corrupt, FingerprintMismatch, UnknownFeature
from engine.state import (
    Canary,
    Fingerprint,
    Layout,
    PartKind,
    Pending,
    SamplerParams,
    Span,
    parts_of,
)
from serialization import stated
from serialization.blobs import BlobClass, BlobId, Bytes, blob_id
from serialization.bodies import pack_body
from serialization.brought import BROUGHT, Brought
from serialization.chunks import CHUNK_SIZES, CHUNK_TOKENS
from serialization.drafts import DRAFT, StoredDraft
from serialization.limits import (
    MAX_CHUNKS,
    MAX_ENTRIES,
    MAX_FEATURES,
    MAX_INTEGER,
    MAX_LABEL_NBYTES,
    MAX_MANIFEST_NBYTES,
    MAX_NOTE_NBYTES,
    MAX_TEXT_NBYTES,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    refuse_above,
)
from serialization.losses import REENCODED, Loss, read_losses
from serialization.migrate.steps import read_newest
from serialization.prefix import Letter, prefix
from serialization.records import Record, Values, exactly, integer, text
from serialization.refs import (
    BlobRef,
    Checkpoint,
    ChunkRef,
    StoredLogits,
    blob_refs,
    check_checkpoints,
    check_chunks,
    read_blob_id,
)
from serialization.replies import REPLIES, KeptReply, read_replies

#: the feature that a manifest needs whose chunks have another number of tokens than CHUNK_TOKENS
CHUNK_SIZE = "chunk_tokens"
#: the feature that a manifest with a note needs
NOTE = "note"
#: the feature that a manifest needs where a chunk, its own or its draft's, goes on with one that was short
PIECES = "pieces"
#: the feature that a manifest of a session with a salt needs
SALT = "salt"
#: features that this build reads; a manifest that needs another one is refused
FEATURES = frozenset({BROUGHT, CHUNK_SIZE, DRAFT, NOTE, PIECES, REENCODED, REPLIES, SALT})
#: what the digest of a salt begins with
SALT_PREFIX = "b3-"

StoredEdge = Pending | StoredLogits | None

_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
#: what a tenant may be called
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SALT = re.compile(rf"{SALT_PREFIX}[0-9a-f]{{64}}")


class ManifestKind(StrEnum):
    TURN = "turn"  # the session as it stood after a turn
    PIN = "pin"  # a turn that a person named, spared by gc and TTL
    TOMBSTONE = "tombstone"  # the session was deleted


@dataclass(frozen=True, slots=True)
class Message:
    """What was said, and the tokens [start, stop) it was fed as; the last one's may end with the pending id.

    The span is empty for what was not fed yet, or has left the context by a shift.
    """

    role: str
    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a fork came from: the first `length` tokens of a manifest of another session."""

    session: str
    manifest: BlobId
    length: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All fields are those of docs/format.md, section 5; `session` is a ULID, times are seconds since 1970.

    The spans cover the tokens, the chunks too, and each checkpoint and edge is as the layout wants it:
    `encode` and `decode` both refuse anything else. Chunks have `chunk_tokens`, those of the last run fewer;
    `reencoded` says what conversions have cost, the first one first.
    """

    session: str
    tenant: str
    name: str | None
    title: str
    kind: ManifestKind
    pin: str | None
    generation: int
    parent: BlobId | None
    forked_from: Origin | None
    created: float
    updated: float
    model: str
    fingerprint: Fingerprint
    template: str | None
    layout: Layout
    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    spans: tuple[Span, ...]
    chunks: tuple[ChunkRef, ...]
    checkpoints: tuple[Checkpoint, ...]
    edge: StoredEdge
    sampler: SamplerParams
    canary: Canary | None = None
    draft: StoredDraft | None = None
    note: str | None = None
    salt: str | None = None
    replies: tuple[KeptReply, ...] = ()
    chunk_tokens: int = CHUNK_TOKENS
    reencoded: tuple[Loss, ...] = ()
    brought: Brought | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """What a reader must know to read this manifest."""
        has = {
            BROUGHT: self.brought is not None,
            CHUNK_SIZE: self.chunk_tokens != CHUNK_TOKENS,
            DRAFT: self.draft is not None,
            NOTE: self.note is not None,
            PIECES: self.has_pieces,
            REENCODED: bool(self.reencoded),
            REPLIES: bool(self.replies),
            SALT: self.salt is not None,
        }
        return tuple(name for name, there in has.items() if there)

    @property
    def length(self) -> int:
        """Number of tokens fed."""
        return len(self.tokens)

    @property
    def has_pieces(self) -> bool:
        chunks = (*self.chunks, *(() if self.draft is None else self.draft.chunks))
        return any(chunk.is_piece(self.chunk_tokens) for chunk in chunks)

    def blobs(self) -> Iterator[BlobRef]:
        """Every blob of rows, point state and logits that is named, each once, in the archive's order."""
        seen: set[BlobId] = set()
        own = blob_refs(self.chunks, self.checkpoints, self.edge)
        for ref in chain(own, () if self.draft is None else self.draft.refs()):
            if ref.blob not in seen:
                seen.add(ref.blob)
                yield ref

    def of_draft(self) -> frozenset[BlobId]:
        """Of those blobs the draft's own, which the session can do without."""
        if self.draft is None:
            return frozenset()
        own = {ref.blob for ref in blob_refs(self.chunks, self.checkpoints, self.edge)}
        return frozenset(ref.blob for ref in self.draft.refs() if ref.blob not in own)

    def refuse_other(self, fingerprint: Fingerprint, layout: Layout) -> None:
        """Raises FingerprintMismatch, which names the field, unless rows mean the same to both."""
        for field, mine, theirs in self.fingerprint.differing(fingerprint):
            raise FingerprintMismatch(
                f"the state was made with another {field}: {mine!r}, not {theirs!r}", field=field
            )
        if self.layout != layout:
            raise FingerprintMismatch("the state was made with another cache layout", field="layout")

    def encode(self) -> bytes:
        """The manifest's bytes, in the newest version. Raises Corrupt or LimitExceeded where `decode` would
        refuse them."""
        try:
            data = prefix(Letter.MANIFEST) + pack_body(self._record())
        except (OverflowError, UnicodeEncodeError, TypeError, ValueError) as error:
            raise Corrupt(f"manifest: a value that cannot be written ({error})") from error
        Manifest.decode(data)  # one set of rules, and it costs a thousandth of the rows' writing
        return data

    @staticmethod
    def decode(data: Bytes) -> Manifest:
        """The manifest that `data` spells, in whichever version. The digest is checked before, by who
        fetched it.

        Raises Corrupt, UnknownVersion, UnknownFeature or LimitExceeded; then nothing was believed.
        """
        refuse_above("manifest, in bytes", len(data), MAX_MANIFEST_NBYTES)
        record = Record(read_newest(data, _check_features), "manifest")
        manifest = _read(record)
        record.end()
        return manifest

    def _record(self) -> dict[str, object]:
        origin = self.forked_from
        record: dict[str, object] = {
            "canary": stated.canary_record(self.canary),
            "checkpoints": [checkpoint.record() for checkpoint in self.checkpoints],
            "chunks": [chunk.record() for chunk in self.chunks],
            "created": float(self.created),
            "edge": _edge_record(self.edge),
            "features": list(self.features),
            "fingerprint": stated.fingerprint_record(self.fingerprint),
            "forked_from": None if origin is None else [origin.session, origin.manifest, origin.length],
            "generation": self.generation,
            "kind": self.kind.value,
            "layout": stated.layout_record(self.layout),
            "messages": [[each.role, each.text, each.start, each.stop] for each in self.messages],
            "model": self.model,
            "name": self.name,
            "parent": self.parent,
            "pin": self.pin,
            "sampler": stated.sampler_record(self.sampler),
            "session": self.session,
            "spans": stated.spans_record(self.spans),
            "template": self.template,
            "tenant": self.tenant,
            "title": self.title,
            "tokens": stated.tokens_record(self.tokens),
            "updated": float(self.updated),
        }
        if self.chunk_tokens != CHUNK_TOKENS:
            record[CHUNK_SIZE] = self.chunk_tokens
        if self.brought is not None:
            record[BROUGHT] = self.brought.record()
        if self.draft is not None:
            record["draft"] = self.draft.record()
        if self.note is not None:
            record["note"] = self.note
        if self.reencoded:
            record[REENCODED] = [loss.record() for loss in self.reencoded]
        if self.replies:
            record["replies"] = [reply.record() for reply in self.replies]
        if self.salt is not None:
            record["salt"] = self.salt
        return record


def manifest_id(data: Bytes) -> BlobId:
    """The name of an encoded manifest."""
    return blob_id(BlobClass.MANIFEST, data)


def _check_features(values: Values) -> None:
    """Before anything else: a manifest that needs an unknown one may well break every other rule."""
    _read_features(Record(values, "manifest"))


def _read_features(record: Record) -> tuple[str, ...]:
    needed = record.items("features", MAX_FEATURES)
    features = tuple(text(each, MAX_LABEL_NBYTES, "feature") for each in needed)
    for feature in features:
        if feature not in FEATURES:
            raise UnknownFeature(
                f"manifest: needs {feature!r}, which this build does not know", feature=feature
            )
    if list(features) != sorted(set(features)):
        raise Corrupt("manifest: features out of order")
    return features


def _read(record: Record) -> Manifest:
    features = _read_features(record)
    layout = stated.read_layout(record.value("layout"))
    tokens = stated.read_tokens(record.value("tokens"))
    chunk_tokens = _read_chunk_tokens(record) if CHUNK_SIZE in features else CHUNK_TOKENS
    length, has_points = len(tokens), bool(parts_of(layout, PartKind.POINT))
    kind = _read_kind(record)
    edge = _read_edge(record.value("edge"), length)
    parent = record.value("parent")
    messages = _read_messages(record, length + isinstance(edge, Pending))
    manifest = Manifest(
        session=_matching(_ULID, record.text("session", MAX_LABEL_NBYTES), "session id"),
        tenant=_matching(TENANT, record.text("tenant", MAX_LABEL_NBYTES), "tenant"),
        name=record.text_or_none("name", MAX_LABEL_NBYTES),
        title=record.text("title", MAX_LABEL_NBYTES),
        kind=kind,
        pin=_read_pin(record, kind),
        generation=record.integer("generation", MAX_INTEGER),
        parent=None if parent is None else read_blob_id(parent, BlobClass.MANIFEST, "parent"),
        forked_from=_read_origin(record.value("forked_from")),
        created=_read_time(record, "created"),
        updated=_read_time(record, "updated"),
        model=record.text("model", MAX_LABEL_NBYTES),
        fingerprint=stated.read_fingerprint(record.record("fingerprint")),
        template=record.text_or_none("template", MAX_LABEL_NBYTES),
        layout=layout,
        tokens=tokens,
        messages=messages,
        spans=stated.read_spans(record.items("spans", MAX_ENTRIES), length),
        chunks=tuple(ChunkRef.read(item, chunk_tokens) for item in record.items("chunks", MAX_CHUNKS)),
        checkpoints=tuple(Checkpoint.read(item) for item in record.items("checkpoints", MAX_ENTRIES)),
        edge=edge,
        sampler=stated.read_sampler(record.record("sampler")),
        canary=stated.read_canary(record.record_or_none("canary"), length),
        draft=(StoredDraft.read(record.record("draft"), length, chunk_tokens) if DRAFT in features else None),
        note=record.text("note", MAX_NOTE_NBYTES) if NOTE in features else None,
        salt=_matching(_SALT, record.text("salt", MAX_LABEL_NBYTES), "salt") if SALT in features else None,
        replies=read_replies(record.value(REPLIES), len(messages)) if REPLIES in features else (),
        chunk_tokens=chunk_tokens,
        reencoded=read_losses(record.value(REENCODED)) if REENCODED in features else (),
        brought=Brought.read(record.record(BROUGHT)) if BROUGHT in features else None,
    )
    check_chunks(manifest.chunks, length, chunk_tokens)
    if manifest.has_pieces != (PIECES in features):
        raise Corrupt("manifest: pieces of chunks without their feature, or the feature without them")
    check_checkpoints(manifest.checkpoints, length, has_points)
    return manifest


def _matching(pattern: re.Pattern[str], value: str, what: str) -> str:
    if not pattern.fullmatch(value):
        raise Corrupt(f"manifest: {value[:40]!r} is no {what}")
    return value


def _read_chunk_tokens(record: Record) -> int:
    chunk_tokens = record.integer(CHUNK_SIZE, MAX_TOKENS)
    if chunk_tokens not in CHUNK_SIZES or chunk_tokens == CHUNK_TOKENS:
        raise Corrupt(f"manifest: chunks of {chunk_tokens} tokens, which need no saying or cannot be")
    return chunk_tokens


def _read_kind(record: Record) -> ManifestKind:
    value = record.text("kind", MAX_LABEL_NBYTES)
    known = {kind.value: kind for kind in ManifestKind}
    if value not in known:
        raise UnknownFeature(f"manifest: of an unknown kind: {value[:40]!r}")
    return known[value]


def _read_pin(record: Record, kind: ManifestKind) -> str | None:
    pin = record.text_or_none("pin", MAX_LABEL_NBYTES)
    if (pin is None) == (kind is ManifestKind.PIN):
        raise Corrupt("manifest: a pin without a name, or a name without a pin")
    return pin


def _read_time(record: Record, key: str) -> float:
    seconds = record.real(key)
    if seconds < 0:
        raise Corrupt(f"manifest: {key}: before 1970")
    return seconds


def _read_origin(value: Any) -> Origin | None:
    if value is None:
        return None
    session, manifest, length = exactly(value, 3, "forked_from")
    return Origin(
        _matching(_ULID, text(session, MAX_LABEL_NBYTES, "forked_from"), "session id"),
        read_blob_id(manifest, BlobClass.MANIFEST, "forked_from"),
        integer(length, MAX_TOKENS, "forked_from"),
    )


def _read_messages(record: Record, end: int) -> tuple[Message, ...]:
    messages: list[Message] = []
    at = 0
    for item in record.items("messages", MAX_ENTRIES):
        role, said, start, stop = exactly(item, 4, "message")
        message = Message(
            text(role, MAX_LABEL_NBYTES, "role"),
            text(said, MAX_TEXT_NBYTES, "message"),
            integer(start, MAX_TOKENS, "message"),
            integer(stop, MAX_TOKENS + 1, "message"),
        )
        if not at <= message.start <= message.stop <= end:
            raise Corrupt("messages: their tokens overlap, or end beyond the session's")
        at = message.stop
        messages.append(message)
    return tuple(messages)


def _edge_record(edge: StoredEdge) -> object:
    match edge:
        case Pending(token):
            return token
        case StoredLogits(ref):
            return ref.record()
        case None:
            return None


def _read_edge(value: Any, length: int) -> StoredEdge:
    if value is None:
        if length:
            raise Corrupt("edge: nothing follows the tokens")
        return None
    if isinstance(value, list):
        return StoredLogits(BlobRef.read(value, BlobClass.POINT, "edge"))
    return Pending(integer(value, MAX_TOKEN_ID, "edge"))

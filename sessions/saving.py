"""The bytes of one turn: snapshot what is new, put its blobs, draw up the manifest that names them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from engine.state import Pending, Provenance, SeqId, SequenceState, Span
from engine.verbs import Verbs
from serialization.archive import write_archive
from serialization.blobs import Store
from serialization.losses import Loss
from serialization.manifest import Manifest, ManifestKind, Message
from serialization.pipelines import codec_set
from serialization.replies import replies_before
from serialization.resume import first_new, first_new_of_draft
from serialization.snapshot import WrittenState, write_state
from serialization.trim import trimmed
from sessions.policy import Policy
from sessions.quota import most_nbytes
from sessions.session import ExportInfo, Session
from sessions.stores.memory import MemoryStore


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn whose rows are stored and whose manifest is not: what it will be, and what was put for it.
    The drafter's rows of `draft_synced` tokens are those that it names."""

    manifest: Manifest
    num_blobs: int
    nbytes: int
    draft_synced: int


def write_turn(
    store: Store,
    engine: Verbs,
    session: Session,
    seq: SeqId,
    messages: Sequence[Message],
    policy: Policy,
    tenant: str,
    ask: Callable[[int], object],
) -> Turn:
    """Put the row blobs of the session's next turn, and of its draft. Before the first one `ask` is told how
    many bytes the whole turn takes at most, and may raise."""
    store = store.scoped(session.id)
    before = session.manifest
    if before is not None and list(before.fingerprint.differing(engine.fingerprint)):
        before = None  # rows of another model, read again: none of the stored ones can be kept
    since = first_new(before, engine.tokens(seq), engine.spans(seq), session.synced)
    state = _with_draft(engine.snapshot(seq, since), engine, seq, before, session.draft_synced, since)
    state = trimmed(state, before, session.synced, session.draft_synced)
    ask(most_nbytes(state, before, messages, session.note))
    written = write_state(
        store,
        state,
        before,
        session.synced,
        codec_set(policy.codec),
        point_budget=policy.checkpoints,
        draft_untouched=session.draft_synced,
    )
    manifest = _manifest(engine, session, messages, tenant, state, written, store.now())
    draft_synced = 0 if state.draft is None else state.draft.reach
    return Turn(manifest, written.num_blobs, written.nbytes, draft_synced)


def stands(engine: Verbs, seq: SeqId, messages: Sequence[Message], session: Session) -> bool:
    """Whether the sequence is where the session's stored turn is, row for row."""
    manifest = session.manifest
    if manifest is None:
        return False
    edge = engine.edge(seq)
    pending = (edge.token,) if isinstance(edge, Pending) else ()
    stored = (manifest.edge.token,) if isinstance(manifest.edge, Pending) else ()
    same = pending == stored and tuple(messages) == manifest.messages
    return same and session.synced == manifest.length and engine.tokens(seq) == manifest.tokens


def _with_draft(
    state: SequenceState, engine: Verbs, seq: SeqId, before: Manifest | None, synced: int, since: int
) -> SequenceState:
    """The state with all rows of its draft that are to be written: of one that lags behind, or was not stored
    before, they begin before the target's."""
    if state.draft is None:
        return state
    least = first_new_of_draft(before, state.draft, state.tokens, state.spans, synced)
    return state if least >= since else replace(state, draft=engine.snapshot(seq, least).draft)


def export_turn(
    out: BinaryIO,
    engine: Verbs,
    session: Session,
    seq: SeqId,
    messages: Sequence[Message],
    policy: Policy,
    tenant: str,
) -> ExportInfo:
    """Write a live sequence as one archive, by way of memory: no store is touched."""
    aside = MemoryStore()
    state = trimmed(engine.snapshot(seq, 0), None, 0)
    written = write_state(aside, state, None, 0, codec_set(policy.codec), point_budget=policy.checkpoints)
    manifest = _manifest(engine, session, messages, tenant, state, written, time.time())
    return export(out, manifest, aside)


def export(out: BinaryIO, manifest: Manifest, store: Store) -> ExportInfo:
    """Write a stored turn as one archive. Its salt stays here: an archive is for others to read."""
    unsalted = replace(manifest, salt=None)
    return ExportInfo(write_archive(out, unsalted, store), sum(1 for _ in manifest.blobs()))


def _losses(before: Manifest | None, spans: Sequence[Span]) -> tuple[Loss, ...]:
    """What conversions have cost of which there are rows still: none where all were computed anew."""
    if before is None or all(span.provenance is Provenance.COMPUTED for span in spans):
        return ()
    return before.reencoded


def _manifest(
    engine: Verbs,
    session: Session,
    messages: Sequence[Message],
    tenant: str,
    state: SequenceState,
    written: WrittenState,
    now: float,
) -> Manifest:
    before = session.manifest
    return Manifest(
        session=session.id,
        tenant=tenant,
        name=session.name,
        title=session.title,
        kind=ManifestKind.TURN,
        pin=None,
        generation=session.generation + 1,
        parent=session.entry.blob if session.entry else None,
        forked_from=session.forked_from,
        created=before.created if before else now,
        updated=now,
        model=engine.model_name,
        template=engine.template.digest if engine.template else None,
        fingerprint=state.fingerprint,
        layout=state.layout,
        tokens=state.tokens,
        spans=state.spans,
        messages=tuple(messages),
        sampler=state.sampler,
        canary=state.canary,
        chunks=written.chunks,
        checkpoints=written.checkpoints,
        edge=written.edge,
        draft=written.draft,
        chunk_tokens=written.chunk_tokens,
        reencoded=_losses(before, state.spans),
        note=session.note,
        brought=session.brought,
        salt=session.salt,
        replies=replies_before(session.replies, len(messages)),
    )

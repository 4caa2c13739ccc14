"""Stores with one of everything that a session may have, and what is compared of them."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from engine.state import Layout
from serialization.archive import write_archive
from serialization.blobs import BlobClass, BlobId, Store
from serialization.manifest import Manifest, Message
from serialization.replies import KeptReply
from serialization.snapshot import write_state
from sessions import names, salts
from sessions.catalog import Catalog
from sessions.manager import SessionManager
from sessions.migrate.request import Request
from sessions.migrate.stores import StoreMigration
from sessions.policy import Policy
from sessions.prefix import PrefixIndex
from sessions.uses import USES
from tests.serialization.states import FOUR_KINDS, drafted, logits_edge, manifest_of, state_of

POLICY = Policy(lease=5, grace=10)
TAG = b"a source of test"


def unopened(path: Path | None) -> AbstractContextManager[BinaryIO]:
    raise AssertionError("whole stores open no file")


def asked(**said: object) -> Request:
    return replace(Request(unopened, unopened, policy=POLICY), **said)


def migration(
    source: Store, target: Store, only: str | None = None, tag: bytes = TAG, **said: object
) -> StoreMigration:
    request = asked(**said)
    manager = SessionManager(target, None, request.policy, tenant=request.tenant)
    return StoreMigration(source, manager, ("the source", "the destination"), tag, request, only)


@dataclass(frozen=True, slots=True)
class Filled:
    """The ids of what `fill` made."""

    tea: str
    fork: str
    plain: str
    own: str
    deleted: str


def session_of(
    store: Store,
    seed: int,
    name: str | None,
    length: int,
    layout: Layout = FOUR_KINDS,
    **fields: object,
) -> Manifest:
    """A session of rows that no other has, whose blobs are put and whose manifest is not."""
    session = str(fields.get("session") or names.new_session_id())
    state = drafted(state_of(length, layout, seed=seed, edge=logits_edge()), min(length, 280))
    written = write_state(store.scoped(session), state, None, 0)
    text = f"What is there to say of number {seed}?"
    return replace(
        manifest_of(state, written),
        **{
            "session": session,
            "name": name,
            "title": text,
            "messages": (Message("user", text, 0, 30), Message("assistant", "Little.", 30, length)),
            "created": 1_700_000_000.0 + seed,
            "updated": 1_700_000_000.5 + seed,
            "generation": 1,
            **fields,
        },
    )


def put_session(
    store: Store,
    seed: int,
    name: str | None = None,
    length: int = 300,
    layout: Layout = FOUR_KINDS,
    over: BlobId | None = None,
    **fields: object,
) -> tuple[str, BlobId]:
    """The same, stored: as a new one, or as the next turn in place of `over`."""
    manifest = session_of(store, seed, name, length, layout, parent=over, **fields)
    session = manifest.session
    blob = store.scoped(session).put(BlobClass.MANIFEST, manifest.encode())
    assert store.swap(names.session_ref(session), None if over is None else over.encode(), blob.encode())
    PrefixIndex(store, "default").add(manifest, 0)
    if name is not None:
        store.hint({names.name_ref(name): session.encode()})
    return session, blob


def turn(store: Store, session: str, seed: int = 0, length: int = 320) -> BlobId:
    """The session goes on by a turn."""
    before = Catalog(store).session(session)
    manifest = before.manifest
    stays = {each: getattr(manifest, each) for each in ("note", "salt", "replies")}
    goes_on = {"generation": manifest.generation + 1, "session": session}
    return put_session(store, seed, manifest.name, length, over=before.blob, **goes_on, **stays)[1]


def fill(store: Store) -> Filled:
    """Sessions named and not, forked, kept, deleted, with older turns, notes, salts, drafts and replies."""
    manager = SessionManager(store, None, POLICY)
    reply = KeptReply(b"k" * 16, b"r" * 16, 1, 1, "stop")
    tea, first = put_session(store, 1, "tea", note="brewed by a service", replies=(reply,))
    turn(store, tea, seed=1)
    manager.pin(tea, "first-cup")
    fork = manager.fork(tea, "tea-again").id
    plain, _ = put_session(store, 2, salt=salts.digest_of("default", "sesame"))
    own = names.new_session_id()
    put_session(store, 3, "own", session=own, salt=salts.own(own))
    deleted, _ = put_session(store, 4, "gone")
    manager.delete(deleted)
    store.hint({USES + tea: b"\x41\xd9\x55\x55\x55\x55\x55\x55"})
    assert first
    return Filled(tea, fork, plain, own, deleted)


def archives(store: Store) -> dict[str, bytes]:
    """What each session and kept turn is, whatever its blobs are called in this store."""
    return {entry.ref: archive(entry.manifest, store) for entry in Catalog(store).entries()}


def archive(manifest: Manifest, store: Store) -> bytes:
    out = io.BytesIO()
    write_archive(out, replace(manifest, parent=None), store)
    return out.getvalue()


def refs(store: Store, *prefixes: str) -> dict[str, bytes]:
    return {ref: value for prefix in prefixes for ref, value in store.list_refs(prefix)}


def blobs(store: Store) -> dict[BlobId, bytes]:
    return {info.blob: bytes(store.get(info.blob)) for info in store.list_blobs()}


def needed(store: Store) -> set[BlobId]:
    return {blob for entry in Catalog(store).entries() for blob in entry.blobs()}


def check_clean(store: Store) -> None:
    report = SessionManager(store, None, POLICY).check()
    assert report.clean, report.problems

"""A store of many sessions: real manifests, refs and hints, put by the stores' own verbs, over a few tiny
chunks that all of them share. No model is needed for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from ulid import ULID

from engine.state import Fingerprint
from serialization.blobs import BlobClass, Store
from serialization.manifest import Manifest, Message
from serialization.snapshot import write_state
from sessions import names
from sessions.prefix import PrefixIndex
from tests.serialization.states import ATTENTION, MEANING, manifest_of, state_of, tokens_of

#: One whole chunk, which is each session's own text, and the beginning of the next.
LENGTH = 300
FINGERPRINT: Fingerprint = MEANING
_TENANT = "default"
#: 2026-01-01, and a session every two minutes from then on.
_FIRST, _EVERY = 1_767_225_600.0, 120.0
#: Every so many sessions one has an older turn, which nothing needs any more.
_SUPERSEDED = 10
_BATCH = 1000


def tokens_in(number: int) -> tuple[int, ...]:
    """What session `number` has read."""
    return (number % 50_000, number // 50_000, *tokens_of(LENGTH)[2:])


def fill(store: Store, count: int) -> None:
    """Make sessions 0 to `count`, named n0, n1…, in an empty store."""
    state = state_of(LENGTH, ATTENTION)
    like = manifest_of(state, write_state(store, state, None, 0))
    numbers = iter(range(count))
    while batch := list(islice(numbers, _BATCH)):
        refs: dict[str, bytes] = {}
        for number in batch:
            manifest = _session(like, number)
            if number % _SUPERSEDED == 0:
                store.put(BlobClass.MANIFEST, replace(manifest, generation=1).encode())
            refs[names.session_ref(manifest.session)] = store.put(
                BlobClass.MANIFEST, manifest.encode()
            ).encode()
            refs[names.name_ref(f"n{number}")] = manifest.session.encode()
            PrefixIndex(store, _TENANT).add(manifest, 0)
        store.hint(refs)


def _session(like: Manifest, number: int) -> Manifest:
    begun = _FIRST + _EVERY * number
    text = f"What is there to say of number {number}?"
    return replace(
        like,
        session=str(ULID.from_timestamp(begun)),
        name=f"n{number}",
        title=text,
        tokens=tokens_in(number),
        messages=(Message("user", text, 0, 200), Message("assistant", "Little.", 200, LENGTH)),
        created=begun,
        updated=begun + 1,
        generation=2,
    )


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Let no write of this process wait for the device: of a store that is thrown away."""
    fsync = os.fsync
    os.fsync = lambda fd: None
    try:
        yield
    finally:
        os.fsync = fsync

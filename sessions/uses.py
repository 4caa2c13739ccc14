"""When sessions were last used: a turn counts by itself, and a restore is noted, so that both put off the
end of their time.

`used/<session>` holds seconds since the epoch by the store's clock, as eight bytes. It is a hint: a note that
is lost makes a session look as old as its last turn. Not every use is noted, only one in a while.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from serialization.blobs import Store
from serialization.manifest import Manifest

USES = "used/"
_TIME = struct.Struct(">d")


def note_use(store: Store, manifest: Manifest, every: float) -> None:
    """`manifest` is in use now. Where that was last noted `every` seconds ago or more, it is noted, and the
    blobs that it names are counted as used. Raises StoreError."""
    ref, now = USES + manifest.session, store.now()
    before = _time(store.read(ref))
    if before is not None and 0 <= now - before < every:
        return
    store.hint({ref: _TIME.pack(now)})
    store.refresh([blob.blob for blob in manifest.blobs()])


def last_used(store: Store, manifest: Manifest) -> float:
    """When the session was last used, by its last turn or a later use that was noted."""
    noted = _time(store.read(USES + manifest.session))
    return max(manifest.updated, _believed(noted, store.now()))


def noted_uses(store: Store) -> Iterator[tuple[str, float]]:
    """Sessions, and when the use of each was last noted."""
    now = store.now()
    for ref, value in store.list_refs(USES):
        yield ref.removeprefix(USES), _believed(_time(value), now)


def _believed(noted: float | None, now: float) -> float:
    """A clock that went back, or damage, must not keep a session for ever."""
    return noted if noted is not None and 0 <= noted <= now else 0.0


def _time(value: bytes | None) -> float | None:
    """None also for a value that is none of ours."""
    if value is None or len(value) != _TIME.size:
        return None
    (at,) = _TIME.unpack(value)
    return float(at)

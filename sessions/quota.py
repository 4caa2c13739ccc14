"""A quota: how many bytes a tenant may store, asked for before anything is written.

What counts is what the store says of itself (`Store.usage`), every byte of it, so that no count of ours can
drift from what is there. That takes a while: it is taken now and then, and what was granted since is added.
The sum is never less than what is there, but for what other processes wrote meanwhile; and before anything
is refused it is taken anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from engine.errors import QuotaExceeded
from engine.state import Layout, NextLogits, PartKind, Point, SequenceState, parts_of
from serialization.blobs import Store
from serialization.chunks import CHUNK_TOKENS
from serialization.manifest import Manifest, Message
from serialization.refs import Stored, chunk_floor

#: What has room made for it: `Quota.room`, or what frees some first.
Room = Callable[[int], AbstractContextManager[None]]

#: Seconds that a figure is believed for, far below the quota and near it.
_FAR, _NEAR = 60.0, 1.0
#: From this part of the quota on it is near.
_IS_NEAR = 0.9
#: A figure is taken so seldom that no more than this part of the time goes into it.
_SHARE = 0.1


class Quota:
    """Of one tenant, in one process. Safe from many threads: one counts, and the others wait for it."""

    def __init__(self, store: Store, most: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` bytes may be stored; None: any number, and nothing is ever counted."""
        self._store = store
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._there = 0  # when it was counted
        self._granted = 0  # since then, and what was being written at that time
        self._writing = 0
        self._counted: float | None = None  # when, by the clock
        self._took = 0.0
        self._freed: float | None = None

    @property
    def most(self) -> int | None:
        return self._most

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Grant `nbytes` to the block, which writes no more than that, or raise QuotaExceeded before it
        begins (details: quota, used, size)."""
        if self._most is None:
            yield
            return
        self._grant(nbytes, self._most)
        try:
            yield
        finally:
            with self._lock:
                self._writing -= nbytes

    def missing(self, nbytes: int) -> int:
        """How many bytes would have to go for `nbytes` more."""
        with self._lock:
            return 0 if self._most is None else max(0, self._there + self._granted + nbytes - self._most)

    def may_free(self) -> bool:
        """Whether it was long ago that something was deleted to make room; asked, it is now."""
        with self._lock:
            now, before = self._clock(), self._freed
            if before is not None and now - before < _FAR:
                return False
            self._freed = now
            return True

    def forget(self) -> None:
        """Count anew before anything is granted: something was deleted."""
        with self._lock:
            self._counted = None

    def _grant(self, nbytes: int, most: int) -> None:
        with self._lock:
            if self._is_old(_NEAR if self._there + self._granted > _IS_NEAR * most else _FAR):
                self._count()
            if self._there + self._granted + nbytes > most and (self._granted or self._is_old(_NEAR)):
                self._count()
            used = self._there + self._granted
            if used + nbytes > most:
                raise QuotaExceeded(
                    f"{used:,} bytes are stored and {nbytes:,} more are needed; {most:,} may be",
                    quota=most,
                    used=used,
                    size=nbytes,
                )
            self._granted += nbytes
            self._writing += nbytes

    def _is_old(self, believed: float) -> bool:
        """Whether the figure is older than the seconds that one is believed for."""
        if self._counted is None:
            return True
        return self._clock() - self._counted >= max(believed, self._took / _SHARE)

    def _count(self) -> None:
        begun = self._clock()
        self._there = self._store.usage()
        self._granted = self._writing
        self._counted = self._clock()
        self._took = self._counted - begun


# --- how much something takes ------------------------------------------------------------------

#: More than a blob has beside its rows: header, seal, its name in the store, and what a manifest says of it.
_BLOB = 1024
#: More than a manifest has beside what grows with the conversation.
_MANIFEST = 16 * 1024


def most_nbytes(
    state: SequenceState, before: Manifest | None, messages: Sequence[Message], note: str | None
) -> int:
    """What a turn takes at most: its rows as if no codec made them smaller, and a manifest that names all."""
    rows = sum(run.nbytes for run in state.rows) + _new_points(state.points, before)
    draft = state.draft
    if draft is not None:
        rows += sum(run.nbytes for run in draft.rows)
        rows += _new_points(draft.points, None if before is None else before.draft)
    if isinstance(state.edge, NextLogits):
        rows += 4 * state.edge.logits.numel()
    said = sum(len(message.text.encode()) + 64 for message in messages) + len((note or "").encode())
    chunk_tokens = CHUNK_TOKENS if before is None else before.chunk_tokens
    blobs = 8 * (state.length // chunk_tokens + 1) + len(state.points)
    return rows + 5 * state.length + said + 256 * len(state.layout) + _BLOB * blobs + _MANIFEST


def about_nbytes(layout: Layout, chunk_tokens: int, synced: int, stop: int) -> int:
    """What a save at `stop` tokens takes before encoding, with one checkpoint, where the first `synced` are
    stored in chunks of `chunk_tokens`. Of windows no more is stored than their chunks."""
    start = min(chunk_floor(synced, chunk_tokens), stop)
    total = sum(spec.row_nbytes for spec in parts_of(layout, PartKind.POINT))
    for spec in layout:
        if spec.kind is not PartKind.POINT:
            since = start if spec.window is None else max(start, stop - spec.window - chunk_tokens)
            total += spec.num_rows(since, stop) * spec.row_nbytes
    return total


def _new_points(points: Sequence[Point], before: Stored | None) -> int:
    known = set() if before is None else {each.position for each in before.checkpoints}
    return sum(part.numel() for point in points if point.position not in known for part in point.parts)

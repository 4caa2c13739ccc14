"""What was migrated as what, kept in the destination itself, one ref for each session and kept turn.

`migrated/<ref in the source>` is written before the commit that it tells of, so that no commit of ours is
ever unknown to the next run; whether it took place is asked of the store, not of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from blake3 import blake3

from engine.errors import Corrupt, IndexDamaged, StateError
from serialization.blobs import BlobClass, BlobId, Store
from serialization.canonical import pack, unpack
from serialization.records import Record
from serialization.refs import read_blob_id
from sessions.migrate.endpoints import without_password
from sessions.stores.base import check_ref_name

JOURNAL = "migrated/"
_WHAT = "a line of the journal of migrations"
_TAG_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Line:
    """The manifest `taken` of the source is committed as `made`, by the ref `ref`, in place of `over` (None:
    as a new one). `source` stands for where it came from; `named` is its name there, `name` the one that it
    has here. `done`: the commit was acknowledged."""

    source: bytes
    taken: BlobId
    ref: str
    made: BlobId
    over: BlobId | None
    named: str | None
    name: str | None
    done: bool = False

    def encode(self) -> bytes:
        return pack(
            {
                "done": self.done,
                "made": self.made,
                "name": self.name,
                "named": self.named,
                "over": self.over,
                "ref": self.ref,
                "source": self.source,
                "taken": self.taken,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Line:
        """Raises IndexDamaged."""
        try:
            record = Record.of(unpack(data, _WHAT), _WHAT)
            source, done, over = record.value("source"), record.value("done"), record.value("over")
            if not isinstance(source, bytes) or not isinstance(done, bool):
                raise Corrupt(f"{_WHAT}: of wrong types")
            line = cls(
                source,
                read_blob_id(record.value("taken"), BlobClass.MANIFEST, _WHAT),
                record.text("ref", 512),
                read_blob_id(record.value("made"), BlobClass.MANIFEST, _WHAT),
                None if over is None else read_blob_id(over, BlobClass.MANIFEST, _WHAT),
                record.text_or_none("named", 512),
                record.text_or_none("name", 512),
                done,
            )
            record.end()
        except StateError as error:
            raise IndexDamaged(str(error)) from error
        check_ref_name(line.ref)
        return line


class Standing(StrEnum):
    """How a session of the source stands to the destination."""

    NEW = "new"  # nothing of it is there
    BEHIND = "behind"  # an earlier turn of it is there, which we put there
    DONE = "done"  # it is there
    AHEAD = "ahead"  # it is there, and went on
    GONE = "gone"  # it was there, and was deleted
    OTHER = "other"  # something else is there by its id or name, or both went on
    UNREADABLE = "unreadable"  # it is damaged in the source
    EXPIRED = "expired"  # the source lost it, as it may


def standing(line: Line | None, taken: BlobId, there: bytes | None, source: bytes) -> Standing:
    """How a ref that is `taken` in the source stands, where the destination has `there` by the line's ref (by
    the same ref, where there is no line). Whether a turn of another source may replace what is there is not
    known here: then it is OTHER."""
    if line is None:
        if there is None:
            return Standing.NEW
        return Standing.DONE if there == taken.encode() else Standing.OTHER
    made = there == line.made.encode()
    if made and line.taken == taken:
        return Standing.DONE
    before = None if line.over is None else line.over.encode()
    if made or (there == before and not line.done):
        if there is None:
            return Standing.NEW
        return Standing.BEHIND if line.source == source else Standing.OTHER
    if there is None:
        return Standing.GONE
    return Standing.AHEAD if line.done and line.taken == taken else Standing.OTHER


class Journal:
    """The lines of one destination."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, refs: Sequence[str]) -> tuple[Line | None, ...]:
        found = self._store.read_many([JOURNAL + ref for ref in refs])
        return tuple(None if value is None else Line.decode(value) for value in found)

    def write(self, lines: Mapping[str, Line]) -> None:
        """In one step, before the commits. What is committed after it in the same store is never there
        without it."""
        self._store.hint({JOURNAL + ref: line.encode() for ref, line in lines.items()})

    def done(self, lines: Mapping[str, Line]) -> None:
        self.write({ref: replace(line, done=True) for ref, line in lines.items()})

    def of(self, source: bytes) -> Iterator[tuple[str, Line]]:
        """What came from that source, by its ref there."""
        for ref, value in self._store.list_refs(JOURNAL):
            line = Line.decode(value)
            if line.source == source and line.done:
                yield ref.removeprefix(JOURNAL), line


def source_tag(url: str, tenant: str) -> bytes:
    """What stands for a source in the journal: its address without password, and whose sessions they are."""
    return blake3(_words(without_password(url), tenant)).digest(length=_TAG_NBYTES)


def _words(*words: str) -> bytes:
    return b"\0".join(word.encode("utf-8", "surrogateescape") for word in words)

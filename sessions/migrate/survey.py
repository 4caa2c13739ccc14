"""Where each session and kept turn of a source stands to a destination: asked of both, before anything is
written."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import Enum, auto
from itertools import count, islice, repeat

from engine.errors import BlobMissing, StateError
from serialization.blobs import BlobId, Store, parse_blob_id
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import is_there
from sessions.migrate.found import Found, Item, Seen
from sessions.migrate.journal import Journal, Line, Standing, standing

#: Refs that are asked about at once.
_PAGE = 256

#: What of a session is its own, beside rows: counted, so that a plan can say that it comes along.
_THINGS = ("note", "salt", "draft", "replies")


class Clash(Enum):
    """What is done where something else is in a session's place."""

    REFUSE = auto()  # nothing at all is begun
    SKIP = auto()  # the session is left out
    RENAME = auto()  # it comes under another name, or another id


class Survey:
    """One look, or several, at both stores; `found` is what was seen. Close it."""

    def __init__(
        self,
        source: Store,
        target: Store,
        tag: bytes,
        clash: Clash,
        pool: ThreadPoolExecutor,
        only: str | None = None,
    ) -> None:
        """`only`: of that session alone, and what was kept of it."""
        self._source = source
        self._target = target
        self._tag = tag
        self._clash = clash
        self._pool = pool
        self._only = only
        self.is_whole = only is None
        self._journal = Journal(target)
        self.found = Found()

    def close(self) -> None:
        self.found.close()

    def look(self) -> None:
        """Ask about everything. What is said to be there already is looked for there."""
        self._look(checks=True)

    def look_again(self) -> None:
        """Ask anew, by the refs alone where nothing changed."""
        self.found.forget()
        self._look(checks=False)

    def num_left(self) -> int:
        """How many we put there from this source before that are not in the source any more."""
        lines = self._journal.of(self._tag)
        return sum(not self.found.has(ref) for ref, _ in lines)

    # --- asking -------------------------------------------------------------------------------

    def _look(self, checks: bool) -> None:
        for prefix in (names.SESSIONS, names.PINS):
            refs = self._source.list_refs(prefix)
            while page := list(islice(refs, _PAGE)):
                for seen in self._judged(page, checks):
                    self.found.keep(self._placed(seen))

    def _judged(self, page: Sequence[tuple[str, bytes]], checks: bool) -> list[Seen]:
        lines = self._journal.read([ref for ref, _ in page])
        places = [ref if line is None else line.ref for (ref, _), line in zip(page, lines, strict=True)]
        there = self._target.read_many(places)
        found = self._pool.map(self._judge, page, lines, places, there, repeat(checks))
        return [seen for seen in found if seen is not None]

    def _judge(
        self, at: tuple[str, bytes], line: Line | None, place: str, there: bytes | None, checks: bool
    ) -> Seen | None:
        ref, value = at
        taken = parse_blob_id(value.decode("ascii", "replace"))
        over = None if there is None else parse_blob_id(there.decode("ascii", "replace"))
        item = Item(ref, taken, standing(line, taken, there, self._tag), place, over)
        if line is not None:
            item = replace(item, named=line.named, name=line.name)
        unread = item.standing in (Standing.AHEAD, Standing.GONE)
        if item.standing is Standing.DONE:
            unread = not (checks and self._is_lost(item))
            if not unread:  # what is missing there is put there again
                item = replace(item, standing=Standing.BEHIND)
        if unread and self._only is None:
            return Seen(item)
        return self._read(item, line)

    def _is_lost(self, item: Item) -> bool:
        """Whether something of what is said to be there is not."""
        try:
            manifest = Manifest.decode(self._target.get(item.over or item.taken))
        except StateError:
            return True
        there = self._target.has([ref.blob for ref in manifest.blobs()])
        return not (all(there) or self._target.rows_expire)

    def _read(self, item: Item, line: Line | None) -> Seen | None:
        try:
            data = self._source.get(item.taken)
            manifest = Manifest.decode(data)
            if self._only is not None and manifest.session != self._only:
                return None
            if item.standing is Standing.OTHER:
                item = replace(item, standing=self._by_descent(item, line, manifest))
            if not self._source.rows_expire:
                self._refuse_missing(manifest)
        except BlobMissing as error:
            if self._source.read(item.ref) != item.taken.encode():
                return None  # it moved on while we looked, and is seen at the next look
            lost = self._source.since() is not None
            return Seen(
                replace(item, standing=Standing.EXPIRED if lost else Standing.UNREADABLE, why=str(error))
            )
        except StateError as error:
            return Seen(replace(item, standing=Standing.UNREADABLE, why=str(error)))
        named = manifest.pin if item.is_pin else manifest.name
        name = named if line is None or line.named != named else line.name
        return Seen(
            replace(item, named=named, name=name, nbytes=len(data)),
            manifest.session,
            tuple(what for what in _THINGS if getattr(manifest, what)),
            tuple((ref.blob, ref.nbytes) for ref in manifest.blobs()),
        )

    def _refuse_missing(self, manifest: Manifest) -> None:
        there = self._source.has([ref.blob for ref in manifest.blobs()])
        if not all(there):
            raise BlobMissing(f"{len(there) - sum(there)} of its {len(there)} stored blobs are gone")

    def _by_descent(self, item: Item, line: Line | None, manifest: Manifest) -> Standing:
        """What is there and what is to come may be turns of one history all the same."""
        if item.over is None:
            return Standing.OTHER
        if line is not None:
            ours = item.over == line.made and descends(self._source, manifest, line.taken)
            return Standing.BEHIND if ours else Standing.OTHER
        if descends(self._source, manifest, item.over):
            return Standing.BEHIND
        try:
            there = Manifest.decode(self._target.get(item.over))
        except StateError:
            return Standing.OTHER
        return Standing.AHEAD if descends(self._target, there, item.taken) else Standing.OTHER

    # --- places -------------------------------------------------------------------------------

    def _placed(self, seen: Seen) -> Seen:
        """With a place of its own in the destination, or as a clash."""
        item = seen.item
        if item.standing not in (Standing.NEW, Standing.BEHIND, Standing.OTHER):
            return seen
        why = ""
        if item.standing is Standing.OTHER:
            why = "is there already with something else in it"
        elif item.name is not None and self._is_taken(item, item.name):
            why = f"is named {item.name!r}, as another session there is"
        if not why:
            return seen
        if self._clash is not Clash.RENAME:
            return replace(seen, item=replace(item, clash=True, why=why))
        return replace(seen, item=self._elsewhere(item, seen.session or names.new_session_id()))

    def _elsewhere(self, item: Item, session: str) -> Item:
        """The same under a name that nobody has here or there, and by another id where that is taken."""
        name = item.name
        if name is not None and self._is_taken(item, name):
            name = next(
                each
                for each in (f"{name[:56]}-{number}" for number in count(2))
                if not self._is_taken(item, each) and not self._is_known(item, each)
            )
        if item.is_pin:
            return replace(item, standing=Standing.NEW, name=name, place=names.pin_ref(name or ""), over=None)
        if item.standing is Standing.OTHER:
            new = names.session_ref(names.like(session))
            return replace(item, standing=Standing.NEW, name=name, place=new, over=None)
        return replace(item, name=name)

    def _is_taken(self, item: Item, name: str) -> bool:
        """Whether something else of the destination has the name."""
        if item.is_pin:
            ref = names.pin_ref(name)
            there = self._target.read(ref)
            return there is not None and not (ref == item.place and item.standing is not Standing.OTHER)
        holder = self._target.read(names.name_ref(name))
        own = None if item.standing is Standing.OTHER else item.place
        if holder is None or names.session_ref(holder.decode()) == own:
            return False
        return is_there(self._target, holder.decode())

    def _is_known(self, item: Item, name: str) -> bool:
        """Whether something of the source has it, or was given it by now."""
        ref = names.pin_ref(name) if item.is_pin else names.name_ref(name)
        return self.found.is_given(name, item.ref) or self._source.read(ref) is not None


def descends(store: Store, manifest: Manifest, ancestor: BlobId) -> bool:
    """Whether `ancestor` is an earlier turn of the same session, by the turns that are still in the store."""
    at = manifest
    while at.parent is not None:
        if at.parent == ancestor:
            return True
        try:
            earlier = Manifest.decode(store.get(at.parent))
        except StateError:
            return False
        if earlier.session != at.session or earlier.generation >= at.generation:
            return False
        at = earlier
    return False

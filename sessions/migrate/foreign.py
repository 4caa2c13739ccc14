"""Files of other systems as one end of a migration, with the model that was named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from engine.verbs import Verbs
from serialization.blobs import Store
from serialization.brought import Proven
from serialization.foreign.conversion import Change
from serialization.foreign.conversion import Fate as ForeignFate
from serialization.foreign.foreign_state import ForeignState
from serialization.foreign.readers import Kind, kind_of, read_foreign
from serialization.manifest import Manifest
from sessions.manager import SessionManager
from sessions.migrate.export import FORMATS, Exported, Shape, export_foreign, wanted_rows
from sessions.migrate.geometry import geometry_of, own_geometry_of
from sessions.migrate.imports import Examined, Progress, Wish, examine, row_types, take_in
from sessions.migrate.plan import Fate, Item
from sessions.turns import after_text

#: Opens the model that was named. Its rows are in these dtypes (`type_k`, `type_v`), where nobody said
#: others.
OpenEngine = Callable[[Mapping[str, str]], Verbs]

_FATES = {
    ForeignFate.KEPT: Fate.KEPT,
    ForeignFate.CONVERTED: Fate.CONVERTED,
    ForeignFate.DROPPED: Fate.DROPPED,
}


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told what came of it."""

    examined: Callable[[Examined], None] = lambda examined: None
    exported: Callable[[Exported], None] = lambda exported: None
    progress: Progress = lambda done, total: None


@dataclass(slots=True)
class ForeignFiles:
    """See `request.Foreign`. `sequence` is the one that is meant in a file of several, `kind` what a file is
    that does not say it itself; a session is written in `format`, for a context of this `shape`."""

    opening: OpenEngine
    wish: Wish = field(default_factory=Wish)
    sequence: int | None = None
    kind: Kind | None = None
    format: str = "llama"
    shape: Shape = field(default_factory=Shape)
    told: Told = field(default_factory=Told)

    def plan_read(self, path: Path) -> tuple[Item, ...]:
        _, _, examined = self._examined(path)
        return tuple(_items(examined))

    def read(self, path: Path, store: Store) -> Manifest:
        engine, _, examined = self._examined(path)
        self.told.examined(examined)
        manager = SessionManager(store, engine)
        # Its name is the destination's to give.
        taken = take_in(manager, examined, replace(self.wish, name=None), self.told.progress)
        return manager.manifest(taken.session.id)

    def plan_write(self, manifest: Manifest) -> tuple[Item, ...]:
        wanted = wanted_rows(self.opening({}), manifest, self.format, self.shape)
        rows = f"as {wanted.type_k} keys and {wanted.type_v} values, for {FORMATS[self.format].read_by}"
        return (
            Item(Fate.CONVERTED, "rows of tokens", manifest.length, rows),
            Item(Fate.DROPPED, "messages", len(manifest.messages), "the file has token ids alone"),
            Item(Fate.DROPPED, "sampler, checkpoints and logits", 1, "the file has no place for them"),
        )

    def write(self, manifest: Manifest, store: Store, out: BinaryIO) -> int:
        exported = export_foreign(self.opening({}), store, manifest, out, self.format, self.shape)
        self.told.exported(exported)
        return exported.nbytes

    def _examined(self, path: Path) -> tuple[Verbs, ForeignState, Examined]:
        """The engine keeps rows as the file has them, where that was left to it: then none is lost."""
        state, kept = self._state(path)
        types = row_types(state)
        engine = self.opening(types if types and types != kept else {})
        return engine, state, examine(engine, state, self.wish)

    def _state(self, path: Path) -> tuple[ForeignState, dict[str, str]]:
        """What the file holds, and the dtypes that the model keeps its rows in if nobody says others. The
        engine is let go: the next one may be another, and two take twice the room."""
        kind = kind_of(path) if self.kind is None else self.kind
        engine = self.opening({})
        geometry = geometry_of(engine) if kind is Kind.LLAMA_CPP else own_geometry_of(engine)
        state = read_foreign(path, geometry, sequence=self.sequence, tokens=self.wish.tokens, kind=self.kind)
        return state, row_types_of(engine)


def row_types_of(engine: Verbs) -> dict[str, str]:
    """The settings that an engine keeps its rows with."""
    meaning = engine.fingerprint.meaning
    return {name: str(meaning[name]) for name in ("type_k", "type_v") if name in meaning}


def _items(examined: Examined) -> Iterator[Item]:
    yield Item(Fate.KEPT, "token ids", len(examined.tokens), "they are the conversation")
    text, said = after_text(examined.messages)
    if text is not None:
        yield Item(Fate.KEPT, "text", 1, "it is no chat by the model's template: what is said follows it")
    if said:
        yield Item(Fate.KEPT, "messages", len(said), "found by the chat template")
    length = 0 if examined.rows is None else examined.rows.length
    for change in examined.conversion.changes:
        yield Item(_FATES[change.fate], change.what, max(length, 1), _why(change))
    if examined.num_read:
        yield Item(Fate.RECOMPUTED, "tokens", examined.num_read, "the model reads what has no rows")
    match examined.brought.proven:
        case Proven.ROWS:
            assert examined.proof is not None
            proof = examined.proof
            why = f"computed again, and within {proof.worst.drift:.2g} of the file ({proof.limit:g} at most)"
            yield Item(Fate.RECOMPUTED, "proof: last tokens", proof.num_rows, why)
        case Proven.UNVERIFIED:
            yield Item(Fate.KEPT, "rows that nobody proved", length, "the session says that it is unverified")
        case Proven.REREAD:
            return


def _why(change: Change) -> str:
    loss = f", by {change.loss:.2g} of their size" if change.loss else ""
    return f"{change.why or 'every number as it is'}{loss}"

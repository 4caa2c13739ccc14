"""What a store holds: sessions with their own and shared bytes, and the bytes of the whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.errors import StateError
from serialization.blobs import Store
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.census import Census, Sizes
from sessions.policy import Policy
from sessions.session import SessionInfo


@dataclass(frozen=True, slots=True)
class Usage:
    """Stored bytes of a tenant. `rows_bytes` (with point state) and `manifest_bytes` are blobs in use,
    `superseded_bytes` blobs that no ref needs (gc takes them), `index_bytes` the rest."""

    rows_bytes: int
    manifest_bytes: int
    superseded_bytes: int
    index_bytes: int

    @property
    def total(self) -> int:
        return self.rows_bytes + self.manifest_bytes + self.superseded_bytes + self.index_bytes


@dataclass(frozen=True, slots=True)
class Page:
    """Some sessions, those begun last first; `after` is what to ask for to get those that follow, None where
    there are none."""

    sessions: tuple[SessionInfo, ...]
    after: str | None


def list_sessions(store: Store, policy: Policy) -> list[SessionInfo]:
    """Every session that can be read, the newest first, with its bytes. All of the store is gone through."""
    catalog, infos = Catalog(store), []
    pins = _pins(catalog)

    def entries() -> Iterator[Entry]:
        for entry in catalog.readable():
            if entry.ref.startswith(names.SESSIONS):
                infos.append(_info(entry, pins, policy))
            yield entry

    with Census(store, entries()) as census:
        census.look()
        sizes = dict(census.sizes())
    none = Sizes(0, 0)
    sized = (
        replace(info, own_bytes=sizes.get(info.id, none).own, shared_bytes=sizes.get(info.id, none).shared)
        for info in infos
    )
    return sorted(sized, key=lambda info: (info.updated, info.id), reverse=True)


def list_page(store: Store, policy: Policy, most: int, after: str | None) -> Page:
    """At most so many of the sessions begun before `after` (an id; None: of all), without their bytes. No
    more than those are read. One that cannot be is left out."""
    catalog = Catalog(store)
    refs = store.last_refs(names.SESSIONS, None if after is None else names.session_ref(after), most + 1)
    pins, infos = _pins(catalog), []
    for ref, value in refs[:most]:
        with contextlib.suppress(StateError):
            infos.append(_info(catalog.read_entry(ref, value), pins, policy))
    last = refs[most - 1][0].removeprefix(names.SESSIONS) if len(refs) > most else None
    return Page(tuple(infos), last)


def read_info(store: Store, policy: Policy, session: str) -> SessionInfo:
    """The session of that id, without its bytes, and nothing else is read. Raises SessionNotFound."""
    catalog = Catalog(store)
    return _info(catalog.session(session), _pins(catalog), policy)


def usage(store: Store) -> Usage:
    """The bytes of `store`, by what they are for; their sum is `store.usage()`."""
    with Census(store, Catalog(store).readable()) as census:
        census.look()
        rows, manifests, blobs = census.rows_bytes(), census.manifest_bytes(), census.nbytes()
    return Usage(rows, manifests, blobs - rows - manifests, max(0, store.usage() - blobs))


def count_turns(manifest: Manifest) -> int:
    return sum(message.role == "user" for message in manifest.messages)


def _pins(catalog: Catalog) -> Mapping[str, Sequence[str]]:
    """The names of each session's pins, in order."""
    found: dict[str, list[str]] = {}
    for entry in catalog.readable_pins():
        found.setdefault(entry.manifest.session, []).append(names.name_of_pin(entry.ref))
    return {session: sorted(pins) for session, pins in found.items()}


def _info(entry: Entry, pins: Mapping[str, Sequence[str]], policy: Policy) -> SessionInfo:
    manifest = entry.manifest
    own_pins = tuple(pins.get(manifest.session, ()))
    expires = None
    if policy.session_ttl is not None and not own_pins:
        expires = manifest.updated + policy.session_ttl
    return SessionInfo(
        id=manifest.session,
        name=manifest.name,
        title=manifest.title,
        parent=manifest.forked_from.session if manifest.forked_from else None,
        model=manifest.model,
        generation=manifest.generation,
        created=manifest.created,
        updated=manifest.updated,
        length=manifest.length,
        turns=count_turns(manifest),
        own_bytes=None,
        shared_bytes=None,
        pins=own_pins,
        expires=expires,
    )

"""What a store holds: sessions with their own and shared bytes, and the bytes of the whole."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.errors import StateError
from serialization.blobs import Store
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog, Entry
from sessions.census import Census, Sizes
from sessions.policy import Policy
from sessions.session import SessionInfo
from sessions.uses import last_used, noted_uses

#: An hour, a day, a week, and thirty days, in seconds.
_AGES = (3600.0, 86400.0, 7 * 86400.0, 30 * 86400.0)


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
    noted = {} if policy.session_ttl is None else dict(noted_uses(store))

    def used(manifest: Manifest) -> float:
        return max(manifest.updated, noted.get(manifest.session, 0.0))

    def entries() -> Iterator[Entry]:
        for entry in catalog.readable():
            if entry.ref.startswith(names.SESSIONS):
                infos.append(_info(entry, pins, policy, used))
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
            entry = catalog.read_entry(ref, value)
            infos.append(_info(entry, pins, policy, lambda manifest: last_used(store, manifest)))
    last = refs[most - 1][0].removeprefix(names.SESSIONS) if len(refs) > most else None
    return Page(tuple(infos), last)


def read_info(store: Store, policy: Policy, session: str) -> SessionInfo:
    """The session of that id, without its bytes, and nothing else is read. Raises SessionNotFound."""
    catalog = Catalog(store)
    entry = catalog.session(session)
    return _info(entry, _pins(catalog), policy, lambda manifest: last_used(store, manifest))


def usage(store: Store) -> Usage:
    """The bytes of `store`, by what they are for; their sum is `store.usage()`."""
    with Census(store, Catalog(store).readable()) as census:
        census.look()
        rows, manifests, blobs = census.rows_bytes(), census.manifest_bytes(), census.nbytes()
    return Usage(rows, manifests, blobs - rows - manifests, max(0, store.usage() - blobs))


@dataclass(frozen=True, slots=True)
class AgeInfo:
    """Blobs that were last put less than `below` seconds ago, and longer ago than those of the entry before;
    None: all that are older."""

    below: float | None
    num_blobs: int
    nbytes: int


def ages(store: Store) -> tuple[AgeInfo, ...]:
    """The blobs of `store` by how long ago they were last put, the youngest first."""
    counts, sizes = [0] * (len(_AGES) + 1), [0] * (len(_AGES) + 1)
    for info in store.list_blobs():
        at = bisect_right(_AGES, info.age)
        counts[at] += 1
        sizes[at] += info.nbytes
    return tuple(
        AgeInfo(below, count, nbytes)
        for below, count, nbytes in zip((*_AGES, None), counts, sizes, strict=True)
    )


def count_turns(manifest: Manifest) -> int:
    return sum(message.role == "user" for message in manifest.messages)


def _pins(catalog: Catalog) -> Mapping[str, Sequence[str]]:
    """The names of each session's pins, in order."""
    found: dict[str, list[str]] = {}
    for entry in catalog.readable_pins():
        found.setdefault(entry.manifest.session, []).append(names.name_of_pin(entry.ref))
    return {session: sorted(pins) for session, pins in found.items()}


def _info(
    entry: Entry, pins: Mapping[str, Sequence[str]], policy: Policy, used: Callable[[Manifest], float]
) -> SessionInfo:
    manifest = entry.manifest
    own_pins = tuple(pins.get(manifest.session, ()))
    expires = None
    if policy.session_ttl is not None and not own_pins:
        expires = used(manifest) + policy.session_ttl
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

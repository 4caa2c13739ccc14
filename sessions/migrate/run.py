"""From two ends to the migration between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Protocol

from serialization.blobs import Store
from sessions.catalog import Catalog
from sessions.manager import SessionManager
from sessions.migrate.endpoints import Endpoint, SessionEnd, StoreEnd
from sessions.migrate.journal import source_tag
from sessions.migrate.moved import Moved, Told
from sessions.migrate.one import OneSession
from sessions.migrate.opening import (
    Opening,
    apart,
    canonical,
    one_way,
    open_planned,
    open_source,
    open_target,
)
from sessions.migrate.plan import Plan
from sessions.migrate.request import Request
from sessions.migrate.stores import StoreMigration


class Migration(Protocol):
    """What is to be done between two ends."""

    def plan(self) -> Plan:
        """What would be done, and why; changes nothing."""
        ...

    def run(self, told: Told) -> Moved:
        """Do it. An error leaves what was moved by then whole, and nothing partial."""
        ...


@contextmanager
def planned(source: Endpoint, target: Endpoint, request: Request) -> Iterator[Migration]:
    """The migration as far as a plan needs it: nothing is made, not even the destination. Raises as
    `opened`."""
    with _between(source, target, request, open_planned) as found:
        yield found


@contextmanager
def opened(source: Endpoint, target: Endpoint, request: Request) -> Iterator[Migration]:
    """The migration. Raises UsageError for ends that nothing leads from one to the other, SessionNotFound,
    SealRefused, StoreError."""
    with _between(source, target, request, open_target) as found:
        yield found


@contextmanager
def _between(source: Endpoint, target: Endpoint, request: Request, opening: Opening) -> Iterator[Migration]:
    match source, target:
        case StoreEnd(), StoreEnd():
            only = None
        case SessionEnd(), StoreEnd() if not source.is_turn:
            only = source.ref  # it keeps its id; any other way it becomes a new session
        case _:
            apart(source, target)
            yield OneSession(source, target, request, opening)
            return
    one_way(source.url, target.url)
    with (
        closing(open_source(source.url, request.tenant, request.keys)) as store,
        closing(opening(target.url, request.tenant, request.keys)) as other,
        _moving(store, other, source, target, request, only) as found,
    ):
        yield found


def _moving(
    store: Store,
    other: Store,
    source: StoreEnd | SessionEnd,
    target: StoreEnd,
    request: Request,
    only: str | None,
) -> StoreMigration:
    manager = SessionManager(other, None, request.policy, tenant=request.tenant)
    tag = source_tag(canonical(source.url), request.tenant)
    session = None if only is None else Catalog(store).find(only)
    return StoreMigration(store, manager, (str(source), str(target)), tag, request, session)

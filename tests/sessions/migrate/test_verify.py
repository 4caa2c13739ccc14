"""What arrived is asked at the destination, by the model, where it can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from cli.files import replacing
from engine.errors import UsageError
from engine.runner import Engine
from serialization.manifest import Manifest
from serialization.reencode.reencoding import Reencoding
from sessions.manager import SessionManager
from sessions.migrate.endpoints import ArchiveEnd, Endpoint, ForeignEnd, SessionEnd, StoreEnd
from sessions.migrate.moved import Moved
from sessions.migrate.reencoded import Reencoded
from sessions.migrate.request import Request
from sessions.migrate.run import opened
from sessions.migrate.verify import Asked, verified
from sessions.policy import Policy
from sessions.stores.disk import DiskStore
from tests.sessions.migrate.places import put_session

LIMIT = Policy().drift


@contextmanager
def reading(path: Path | None) -> Iterator[BinaryIO]:
    assert path is not None
    with path.open("rb") as file:
        yield file


REQUEST = Request(reading, lambda path: replacing(path or Path("-")))


@pytest.fixture
def url(tmp_path: Path, engine: Engine) -> str:
    """Four sessions of the engine's model, and one of another."""
    with closing(DiskStore(tmp_path / "there")) as store:
        manager = SessionManager(store, engine)
        for name in ("one", "two", "three", "four"):
            session = manager.create(name)
            seq = engine.create()
            engine.feed(seq, engine.tokenizer.encode(f"what is there to say of number {name}? " * 3))
            manager.save(session, seq, ())
            session.close()
            engine.close(seq)
        put_session(store, 1, "stranger")
    return str(tmp_path / "there")


def moved_and_asked(
    source: Endpoint, target: Endpoint, engine: Engine, count: int, request: Request = REQUEST
) -> list[Asked]:
    def load(manifest: Manifest) -> Engine:
        return engine

    with opened(source, target, request) as migration:
        moved = migration.run(lambda progress: None)
    return list(verified(source, target, request, moved, count, LIMIT, load))


def test_of_a_whole_store_some_sessions_are_asked_at_one_length_each(
    url: str, tmp_path: Path, engine: Engine
) -> None:
    asked = moved_and_asked(StoreEnd(url), StoreEnd(str(tmp_path / "new")), engine, 3)
    assert len({each.session for each in asked}) == 3
    asked = moved_and_asked(StoreEnd(url), StoreEnd(str(tmp_path / "new")), engine, 100)
    found = [each.found for each in asked if each.found is not None]
    assert [len(each.samples) for each in found] == [1] * 4
    assert not any(each.drifted for each in found)
    [stranger] = [each for each in asked if each.found is None]
    assert "was made with" in stranger.why


@pytest.mark.parametrize("kind", ["session with its id", "session", "archive"])
def test_one_session_is_asked_at_all_the_lengths(url: str, tmp_path: Path, engine: Engine, kind: str) -> None:
    new = str(tmp_path / "new")
    target: Endpoint = {
        "session with its id": StoreEnd(new),
        "session": SessionEnd(new, "copy"),
        "archive": ArchiveEnd(tmp_path / "one.tenuto"),
    }[kind]
    [asked] = moved_and_asked(SessionEnd(url, "one"), target, engine, 3)
    assert asked.found is not None
    assert len(asked.found.samples) == 3
    assert not asked.found.drifted
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_coarser_rows_drift_and_it_shows(url: str, tmp_path: Path, engine: Engine) -> None:
    said = replace(REQUEST, conversion=Reencoded(Reencoding(type_k="q4_0", type_v="q4_0"), engine.form))
    new = SessionEnd(str(tmp_path / "new"), "copy")
    with opened(SessionEnd(url, "one"), new, said) as migration:
        moved = migration.run(lambda progress: None)
    # The engine's own rows are of another dtype, and are held against those.
    [asked] = verified(SessionEnd(url, "one"), new, said, moved, 2, 0.0, lambda manifest: engine)
    assert asked.found is None or asked.found.drifted


def test_what_has_gone_by_or_is_another_programs_cannot_be_asked(
    url: str, tmp_path: Path, engine: Engine
) -> None:
    for target in (ArchiveEnd(None), ForeignEnd(tmp_path / "state.bin")):
        with pytest.raises(UsageError):
            list(verified(SessionEnd(url, "one"), target, REQUEST, Moved(), 1, LIMIT, lambda _: engine))

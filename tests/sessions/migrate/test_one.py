"""One session goes from anywhere to anywhere, whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from cli.files import replacing
from engine.errors import Corrupt, SealRefused, SessionExists, SessionNotFound, StateError, UsageError
from engine.state import PartKind, Provenance
from serialization.archive import copy_archive, read_archive
from serialization.blobs import Store
from serialization.manifest import Manifest
from serialization.reencode.reencoding import Reencoding, Windows
from serialization.snapshot import read_state
from sessions.catalog import Catalog
from sessions.migrate.endpoints import ArchiveEnd, Endpoint, ForeignEnd, SessionEnd, StoreEnd
from sessions.migrate.moved import Moved
from sessions.migrate.opening import Keys
from sessions.migrate.plan import Fate, Item, Plan
from sessions.migrate.reencoded import Reencoded
from sessions.migrate.request import Request
from sessions.migrate.run import opened, planned
from sessions.migrate.survey import Clash
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store
from sessions.stores.sealed import SealedStore
from tests.faults import flip
from tests.serialization.states import ATTENTION
from tests.sessions.migrate.places import (
    Filled,
    archive,
    archives,
    blobs,
    check_clean,
    fill,
    put_session,
    refs,
)
from tests.sessions.sealing import ring


@contextmanager
def reading(path: Path | None) -> Iterator[BinaryIO]:
    assert path is not None
    with path.open("rb") as file:
        yield file


REQUEST = Request(reading, lambda path: replacing(path or Path("-")))


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    with closing(DiskStore(tmp_path / "store")) as store:
        return fill(store)


@pytest.fixture
def store_url(tmp_path: Path, filled: Filled) -> str:
    return str(tmp_path / "store")


def move(source: Endpoint, target: Endpoint, **said: object) -> Moved:
    with opened(source, target, replace(REQUEST, **said)) as migration:
        return migration.run(lambda progress: None)


def plan(source: Endpoint, target: Endpoint, **said: object) -> Plan:
    with planned(source, target, replace(REQUEST, **said)) as migration:
        return migration.plan()


def stored(url: str, ref: str) -> bytes:
    """The session as an archive, but for who it is."""
    with closing(open_store(url)) as store:
        return _nobody(Catalog(store).session(Catalog(store).find(ref)).manifest, store)


def _nobody(manifest: Manifest, store: Store) -> bytes:
    like = replace(
        manifest, session="01ARZ3NDEKTSV4RRFFQ69G5FAV", name=None, note=None, replies=(), generation=1
    )
    like = replace(like, created=0.0, updated=0.0, forked_from=None, salt=None)
    spans = tuple(replace(span, provenance=Provenance.COMPUTED) for span in manifest.spans)
    return archive(replace(like, spans=spans), store)


def test_through_archives_and_stores_the_rows_are_the_same(tmp_path: Path, store_url: str) -> None:
    one, two = ArchiveEnd(tmp_path / "one.tenuto"), ArchiveEnd(tmp_path / "two.tenuto")
    other, third = str(tmp_path / "other"), str(tmp_path / "third")
    move(SessionEnd(store_url, "tea"), one)
    move(one, two)
    assert one.path is not None
    assert two.path is not None
    assert one.path.read_bytes() == two.path.read_bytes()
    move(two, StoreEnd(other))
    move(SessionEnd(other, "tea"), SessionEnd(third, "cup"))
    assert stored(third, "cup") == stored(other, "tea") == stored(store_url, "tea")
    for url in (other, third):
        with closing(open_store(url)) as store:
            check_clean(store)


@pytest.mark.parametrize("conversion", [None, Reencoded(Reencoding(codec="raw"))])
def test_what_an_archive_says_is_nobodys_computation(
    conversion: Reencoded | None, tmp_path: Path, store_url: str
) -> None:
    kept = ArchiveEnd(tmp_path / "one.tenuto")
    move(SessionEnd(store_url, "tea"), kept)
    moved = move(kept, SessionEnd(store_url, "copy"), conversion=conversion)
    with closing(open_store(store_url)) as store:
        manifest = Catalog(store).session(moved.session or "").manifest
    assert {span.provenance for span in manifest.spans} == {Provenance.IMPORTED}
    assert (manifest.name, manifest.note, manifest.salt) == ("copy", None, None)


def test_a_whole_session_keeps_its_id_and_a_turn_of_it_does_not(
    tmp_path: Path, store_url: str, filled: Filled
) -> None:
    whole, turn, kept = (str(tmp_path / name) for name in ("whole", "turn", "kept"))
    assert move(SessionEnd(store_url, "tea"), StoreEnd(whole)).session == filled.tea
    first = move(SessionEnd(store_url, "tea@1"), StoreEnd(turn)).session
    assert first != filled.tea
    move(SessionEnd(store_url, "pin:first-cup"), SessionEnd(kept, "cup"))
    with closing(open_store(turn)) as store:
        assert Catalog(store).session(first or "").manifest.length == 300
    assert stored(kept, "cup") == stored(store_url, "tea")


def test_a_name_that_is_taken_is_refused_before_a_blob_is_put(tmp_path: Path, store_url: str) -> None:
    kept = ArchiveEnd(tmp_path / "one.tenuto")
    move(SessionEnd(store_url, "tea"), kept)
    with closing(open_store(store_url)) as store:
        before = blobs(store), refs(store, "")
        with pytest.raises(SessionExists):
            move(kept, StoreEnd(store_url))
        with pytest.raises(SessionExists):
            move(SessionEnd(store_url, "own"), SessionEnd(store_url, "tea"))
        assert (blobs(store), refs(store, "")) == before
        renamed = move(kept, StoreEnd(store_url), clash=Clash.RENAME).session
        nameless = move(kept, StoreEnd(store_url), clash=Clash.SKIP).session
        assert Catalog(store).session(renamed or "").manifest.name == "tea-2"
        assert Catalog(store).session(nameless or "").manifest.name is None


def test_a_whole_store_is_no_archive(tmp_path: Path, store_url: str) -> None:
    for act in (plan, move):
        with pytest.raises(UsageError, match="STORE#NAME"):
            act(StoreEnd(store_url), ArchiveEnd(tmp_path / "one.tenuto"))
    assert not (tmp_path / "one.tenuto").exists()


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_damaged_archive_leaves_nothing_that_is_seen(
    tmp_path: Path, store_url: str, damage: str, converted: bool
) -> None:
    path = tmp_path / "one.tenuto"
    move(SessionEnd(store_url, "tea"), ArchiveEnd(path))
    data = path.read_bytes()
    path.write_bytes(
        {"flipped": flip(data, 8 * len(data) - 4000), "cut": data[:-40], "longer": data + b"x"}[damage]
    )
    said = {"conversion": Reencoded(Reencoding(codec="raw"))} if converted else {}
    for target in (ArchiveEnd(tmp_path / "two.tenuto"), StoreEnd(str(tmp_path / "other"))):
        with pytest.raises(Corrupt):
            move(ArchiveEnd(path), target, **said)
    assert not (tmp_path / "two.tenuto").exists()
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")], "put aside, and left"
    if (tmp_path / "other").exists():
        with closing(open_store(str(tmp_path / "other"))) as store:
            assert archives(store) == {}
            check_clean(store)


def test_what_is_written_to_a_stream_that_ends_early_is_no_archive(store_url: str, filled: Filled) -> None:
    class Pipe(io.BytesIO):
        def write(self, data: object, /) -> int:
            if self.tell() > 20_000:
                raise BrokenPipeError
            return super().write(data)  # type: ignore[arg-type]

    with closing(open_store(store_url)) as store:
        whole = archive(Catalog(store).session(filled.tea).manifest, store)
    out = Pipe()
    with pytest.raises(BrokenPipeError):
        copy_archive(io.BytesIO(whole), out)
    with pytest.raises(Corrupt):
        read_archive(io.BytesIO(out.getvalue()), MemoryStore())


# --- re-encoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["store", "archive", "archive to archive", "whole store"])
def test_re_encoded_on_its_way_it_says_the_same(
    tmp_path: Path, store_url: str, way: str, filled: Filled
) -> None:
    said = {"conversion": Reencoded(Reencoding(codec="raw", windows=Windows.NEEDED))}
    other, kept = str(tmp_path / "other"), ArchiveEnd(tmp_path / "one.tenuto")
    match way:
        case "store":
            move(SessionEnd(store_url, "tea"), SessionEnd(other, "tea"), **said)
        case "archive":
            move(SessionEnd(store_url, "tea"), kept, **said)
            move(kept, StoreEnd(other))
        case "archive to archive":
            move(SessionEnd(store_url, "tea"), ArchiveEnd(tmp_path / "zero.tenuto"))
            move(ArchiveEnd(tmp_path / "zero.tenuto"), kept, **said)
            move(kept, StoreEnd(other))
        case _:
            assert move(StoreEnd(store_url), StoreEnd(other), **said).num_sessions == 4
            assert move(StoreEnd(store_url), StoreEnd(other), **said).before == 5
    with closing(open_store(store_url)) as store, closing(open_store(other)) as there:
        check_clean(there)
        catalog = Catalog(there)
        before = Catalog(store).session(filled.tea).manifest
        after = catalog.session(catalog.find("tea")).manifest
        one, two = read_state(store, before), read_state(there, after)
        assert (one.tokens, one.layout) == (two.tokens, two.layout)
        for mine, theirs in zip(one.rows_of(PartKind.TOKEN), two.rows_of(PartKind.TOKEN), strict=True):
            assert all(bool((a == b).all()) for a, b in zip(mine.parts, theirs.parts, strict=True))
        assert {ref.blob for ref in after.blobs()} != {ref.blob for ref in before.blobs()}


def test_a_cut_session_is_its_beginning(tmp_path: Path, store_url: str) -> None:
    cut = Reencoded(Reencoding(cut=256))
    with closing(open_store(store_url)) as store:
        put_session(store, 6, "rows", layout=ATTENTION)
    wanted = SessionEnd(store_url, "rows"), SessionEnd(store_url, "beginning")
    assert any("256" in item.why + item.what for item in plan(*wanted, conversion=cut).items)
    moved = move(*wanted, conversion=cut)
    with closing(open_store(store_url)) as store:
        assert Catalog(store).session(moved.session or "").manifest.length == 256


# --- sealed stores ---------------------------------------------------------------------------------


def test_between_stores_in_the_clear_and_sealed_ones(tmp_path: Path, store_url: str) -> None:
    mine, theirs = ring(tmp_path / "mine"), ring(tmp_path / "theirs")
    sealed, other, clear = (str(tmp_path / name) for name in ("sealed", "other", "clear"))
    move(StoreEnd(store_url), StoreEnd(sealed), keys=Keys(mine, mine))
    move(StoreEnd(sealed), StoreEnd(other), keys=Keys(mine, theirs))
    move(StoreEnd(other), StoreEnd(clear), keys=Keys(theirs, theirs, clear=True))
    with closing(open_store(store_url)) as store:
        whole = archives(store)
    for url, keyring in ((sealed, mine), (other, theirs), (clear, None)):
        with closing(open_store(url, keyring=keyring)) as store:
            assert isinstance(store, SealedStore) == (keyring is not None)
            assert archives(store) == whole
            check_clean(store)


def test_nothing_sealed_is_opened_or_unsealed_by_accident(tmp_path: Path, store_url: str) -> None:
    mine = ring(tmp_path / "mine")
    sealed, clear = str(tmp_path / "sealed"), str(tmp_path / "clear")
    move(StoreEnd(store_url), StoreEnd(sealed), keys=Keys(mine, mine))
    for keys in (Keys(), Keys(ring(tmp_path / "wrong"), None)):
        with pytest.raises(SealRefused):
            move(StoreEnd(sealed), StoreEnd(clear), keys=keys)
    DiskStore(clear).put("rows", b"in the clear")  # type: ignore[arg-type]
    with pytest.raises(SealRefused, match="clear"):
        move(StoreEnd(sealed), StoreEnd(clear), keys=Keys(mine, mine))


def test_a_file_does_not_become_itself(tmp_path: Path, store_url: str) -> None:
    path, link = tmp_path / "tea.tenuto", tmp_path / "link.tenuto"
    move(SessionEnd(store_url, "tea"), ArchiveEnd(path))
    link.symlink_to(path)
    before = path.read_bytes()
    for target in (ArchiveEnd(path), ArchiveEnd(link), ForeignEnd(path)):
        with pytest.raises(UsageError, match="the same file"):
            move(ArchiveEnd(path), target, writing=lambda path: replacing(path or Path("-"), force=True))
    assert path.read_bytes() == before


def test_a_source_is_never_made(tmp_path: Path, store_url: str) -> None:
    with pytest.raises(SessionNotFound):
        move(StoreEnd(store_url), StoreEnd(str(tmp_path / "other")), tenant="somebody")
    assert not (tmp_path / "other").exists()
    before = sorted(path for path in tmp_path.rglob("*") if "index" not in path.name)
    plan(StoreEnd(store_url), StoreEnd(str(tmp_path / "other")))
    assert sorted(path for path in tmp_path.rglob("*") if "index" not in path.name) == before


# --- files of other programs -----------------------------------------------------------------------


class Fake:
    """A program whose files are archives behind a letter."""

    def plan_read(self, path: Path) -> tuple[Item, ...]:
        return (Item(Fate.CONVERTED, "rows", 1, "from letters"),)

    def read(self, path: Path, store: Store) -> Manifest:
        with path.open("rb") as file:
            if file.read(1) != b"F":
                raise Corrupt("no file of that program")
            return read_archive(file, store)

    def plan_write(self, manifest: Manifest) -> tuple[Item, ...]:
        return (Item(Fate.DROPPED, "sampler", 1, "that program keeps none"),)

    def write(self, manifest: Manifest, store: Store, out: BinaryIO) -> int:
        out.write(b"F")
        data = archive(manifest, store)
        return 1 + out.write(data)


def test_files_of_another_program_come_and_go(tmp_path: Path, store_url: str) -> None:
    foreign, other = ForeignEnd(tmp_path / "state.bin"), str(tmp_path / "other")
    assert plan(SessionEnd(store_url, "own"), foreign, foreign=Fake()).of(Fate.DROPPED)[-1].what == "sampler"
    moved = move(SessionEnd(store_url, "own"), foreign, foreign=Fake())
    assert moved.nbytes == (tmp_path / "state.bin").stat().st_size
    assert plan(foreign, SessionEnd(other, "back"), foreign=Fake()).of(Fate.CONVERTED)
    move(foreign, SessionEnd(other, "back"), foreign=Fake())
    assert stored(other, "back") == stored(store_url, "own")
    move(foreign, ArchiveEnd(tmp_path / "one.tenuto"), foreign=Fake())
    (tmp_path / "state.bin").write_bytes(b"xyz")
    with pytest.raises(StateError):
        move(foreign, SessionEnd(other, "bad"), foreign=Fake())
    with pytest.raises(UsageError, match="-m"):
        move(foreign, SessionEnd(other, "bad"))
    with closing(open_store(other)) as store:
        assert len(archives(store)) == 1

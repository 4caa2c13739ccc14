"""Every text means one thing, or is refused with what was understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import TenutoError, UsageError
from sessions.migrate.endpoints import (
    ArchiveEnd,
    Endpoint,
    ForeignEnd,
    SessionEnd,
    StoreEnd,
    source_of,
    target_of,
)
from sessions.migrate.opening import canonical, one_way
from sessions.stores.disk import TENANTS
from sessions.stores.open import SCHEMES

IN_USE = "redis://cache:6379/0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store, one with a # in its name, an archive by its bytes, and files and folders that are neither."""
    for name in ("store", "a#tea"):
        (tmp_path / name / TENANTS).mkdir(parents=True)
    (tmp_path / "old.tenuto").write_bytes(b"tenutoA\x01...")
    (tmp_path / "misnamed.bin").write_bytes(b"tenutoA\x01...")
    (tmp_path / "state.bin").write_bytes(b"qsgg\x03\0\0\0")
    (tmp_path / "state.tenuto").write_bytes(b"qsgg\x03\0\0\0")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cache.db").write_bytes(b"SQLite")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


SOURCES: dict[str, Endpoint] = {
    "store:": StoreEnd(IN_USE),
    "session:tea": SessionEnd(IN_USE, "tea"),
    "session:tea@3": SessionEnd(IN_USE, "tea@3"),
    "pin:best": SessionEnd(IN_USE, "pin:best"),
    "store": StoreEnd("store"),
    "./store/": StoreEnd("./store/"),
    "disk:store": StoreEnd("disk:store"),
    "store#tea": SessionEnd("store", "tea"),
    "store#pin:best": SessionEnd("store", "pin:best"),
    "disk:store#tea@2": SessionEnd("disk:store", "tea@2"),
    "a#tea": StoreEnd("a#tea"),
    "a#tea#tea": SessionEnd("a#tea", "tea"),
    "redis://h:1/2": StoreEnd("redis://h:1/2"),
    "redis://h:1/2#tea": SessionEnd("redis://h:1/2", "tea"),
    "tiered:memory=1M,redis://h#tea": SessionEnd("tiered:memory=1M,redis://h", "tea"),
    "-": ArchiveEnd(None),
    "old.tenuto": ArchiveEnd(Path("old.tenuto")),
    "misnamed.bin": ArchiveEnd(Path("misnamed.bin")),
    "archive:old.tenuto": ArchiveEnd(Path("old.tenuto")),
    "state.bin": ForeignEnd(Path("state.bin")),
    "state.tenuto": ForeignEnd(Path("state.tenuto")),
    "foreign:state.bin": ForeignEnd(Path("state.bin")),
    "cache": ForeignEnd(Path("cache")),
}


@pytest.mark.parametrize("text", SOURCES)
def test_a_source_is_what_lies_there(folder: Path, text: str) -> None:
    assert source_of(text, IN_USE) == SOURCES[text]


TARGETS: dict[str, Endpoint] = {
    "store:": StoreEnd(IN_USE),
    "session:tea": SessionEnd(IN_USE, "tea"),
    "store": StoreEnd("store"),
    "empty": StoreEnd("empty"),
    "new/": StoreEnd("new/"),
    "disk:new": StoreEnd("disk:new"),
    "store#tea": SessionEnd("store", "tea"),
    "redis://h": StoreEnd("redis://h"),
    "-": ArchiveEnd(None),
    "new.tenuto": ArchiveEnd(Path("new.tenuto")),
    "archive:new": ArchiveEnd(Path("new")),
    "foreign:new": ForeignEnd(Path("new")),
}


@pytest.mark.parametrize("text", TARGETS)
def test_a_destination_is_told_by_its_end_where_nothing_lies_there(folder: Path, text: str) -> None:
    assert target_of(text, IN_USE) == TARGETS[text]


def test_with_a_format_a_destination_is_a_foreign_file(folder: Path) -> None:
    assert target_of("state.bin", IN_USE, foreign=True) == ForeignEnd(Path("state.bin"))
    for text in ("redis://h", "session:tea", "archive:new"):
        with pytest.raises(UsageError, match="--to"):
            target_of(text, IN_USE, foreign=True)


@pytest.mark.parametrize(
    "text",
    [
        *("", "nothing", "nothing.tenuto", "nothing#tea", "cache#tea", "store#", "redis://h#", "session:"),
        *("pin:", "archive:", "foreign:nothing", "archive:nothing", "disk:nothing", "disk:empty", "a\0b"),
        *("http://h", "memory:", "store:tea", "disk:nothing#tea", "~nobody-of-that-name/store", "/dev/null"),
    ],
)
def test_a_source_that_is_not_there_or_means_nothing_is_refused(folder: Path, text: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError) as refused:
        source_of(text, IN_USE)
    assert "\n" not in str(refused.value)
    assert sorted(folder.rglob("*")) == before, "looking made something"


@pytest.mark.parametrize(
    "text", ["", "new", "new.bin", "cache", "nothing#tea", "http://h", "memory:", "store#"]
)
def test_a_destination_that_could_be_several_things_is_refused(folder: Path, text: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError):
        target_of(text, IN_USE)
    assert sorted(folder.rglob("*")) == before


def test_ends_do_not_tell_passwords(folder: Path) -> None:
    for end in (StoreEnd("redis://me:secret@h/0"), SessionEnd("redis://me:secret@h/0", "tea")):
        assert "secret" not in str(end)
        assert "h/0" in str(end)


def test_every_kind_of_store_is_a_kind_of_end(folder: Path) -> None:
    for scheme in SCHEMES:
        if scheme == "memory":
            continue
        url = {"disk": "disk:store", "file": f"file://{folder}/store", "tiered": "tiered:memory=1M,store"}
        assert isinstance(source_of(url.get(scheme, f"{scheme}://h"), IN_USE), StoreEnd)


def test_a_store_is_not_moved_to_itself(folder: Path) -> None:
    (folder / "link").symlink_to("store")
    for other in (
        "store",
        "./store/",
        "disk:store",
        f"file://{folder}/store",
        "link",
        "tiered:memory=1M,store",
    ):
        assert canonical(other) == canonical("store")
        with pytest.raises(TenutoError, match="the same store"):
            one_way("store", other)
    one_way("store", "a#tea")

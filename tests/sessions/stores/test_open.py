"""A store's address leads to the right store, or is refused with what would have been right."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError, NameRefused, StoreUnavailable, UsageError
from serialization.blobs import BlobClass
from sessions.stores.base import StoreConfig
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.open import SCHEMES, open_store, parse_size
from sessions.stores.tiered import TieredStore


@pytest.mark.parametrize("form", ["{}", "disk:{}", "file://{}", "file://localhost{}"])
def test_a_folder_in_each_form_is_the_same_store(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "a store"
    first = DiskStore(folder)
    first.swap("s", None, b"x")
    first.close()
    store = open_store(form.format(folder if form != "file://{}" else str(folder).replace(" ", "%20")))
    assert isinstance(store, DiskStore)
    if "localhost" not in form:
        assert store.read("s") == b"x"
    store.close()


def test_home_is_understood(isolated: Path) -> None:
    store = open_store("~/sessions")
    store.close()
    assert (isolated / "sessions" / "tenants").is_dir()


def test_memory_and_tiers(tmp_path: Path) -> None:
    assert isinstance(open_store("memory:"), MemoryStore)
    store = open_store(f"tiered:memory=1M,disk=2GiB@{tmp_path}/quick,disk:{tmp_path}/last")
    assert isinstance(store, TieredStore)
    blob = store.put(BlobClass.ROWS, b"x")
    store.close()
    for folder in ("quick", "last"):
        disk = open_store(f"{tmp_path}/{folder}")
        assert disk.get(blob) == b"x"
        disk.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/x",
        "memory:x",
        "disk:",
        "file://elsewhere/x",
        "file:relative",
        "file:///x?y",
        "tiered:",
        "tiered:memory=1M",
        "tiered:memory=1M,",
        "tiered:memory=lots,memory:",
        "tiered:memory=1M@/x,memory:",
        "tiered:disk=1M,memory:",
        "redis+http://host",
        "redis://host/x",
        "redis://host/1/2",
        "rediss://user:word@host:1/-1",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


def test_the_refusal_names_what_is_known() -> None:
    with pytest.raises(UsageError) as caught:
        open_store("ftp://host/x")
    assert all(scheme in str(caught.value) for scheme in SCHEMES)


def test_a_bad_tenant_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(NameRefused):
        open_store(str(tmp_path / "x"), tenant="../y")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0", "unix:///nowhere.sock", "redis+cluster://127.0.0.1:1"]
)
def test_a_server_that_is_not_there_is_one_line(url: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        open_store(url, config=StoreConfig(connect_timeout=1))
    assert "\n" not in str(caught.value)


def test_sizes_are_powers_of_1024() -> None:
    assert [parse_size(text) for text in ("7", "7B", "2K", "3MB", "1GiB", "1T")] == [
        7,
        7,
        2048,
        3 << 20,
        1 << 30,
        1 << 40,
    ]
    for text in ("", "M", "-1", "1.5G", "1X", "1 M"):
        with pytest.raises(UsageError):
            parse_size(text)


def test_unknown_and_senseless_settings_are_refused_by_name() -> None:
    assert StoreConfig.from_mapping({"attempts": 2}).attempts == 2
    for settings in (
        {"attemps": 2},
        {"attempts": 0},
        {"max_blob": -1},
        {"rows_ttl": 0.5},
        {"replica_timeout": 99},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            StoreConfig.from_mapping(settings)

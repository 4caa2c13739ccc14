"""`tenuto migrate --format` of stores that earlier builds wrote: all of it in the newest version."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from serialization.blobs import BlobClass, blob_class
from serialization.migrate.steps import manifest_version
from sessions.stores.disk import DiskStore
from tests.cli.conftest import Tenuto
from tests.golden.stores import HERE

COMMITS = sorted(path.stem for path in (HERE / "stores").glob("*.zip"))
LISTED = {"tea", "window", "draft", "branch"}


def versions(folder: Path) -> set[int]:
    store = DiskStore(folder)
    manifests = [info.blob for info in store.list_blobs() if blob_class(info.blob) is BlobClass.MANIFEST]
    found = {manifest_version(store.get(blob)) for blob in manifests}
    store.close()
    return found


@pytest.mark.parametrize("commit", COMMITS)
def test_an_old_store_is_written_anew_and_nothing_of_it_is_lost(
    tenuto: Tenuto, tmp_path: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(HERE / "stores" / f"{commit}.zip") as archive:
        archive.extractall(tmp_path / "old")
    source, target = tmp_path / "old" / "clear", tmp_path / "new"
    assert versions(source) == {1}

    kept = tenuto("migrate", f"{source}", f"{tmp_path / 'kept'}/")
    assert kept.code == 0, kept.err
    assert versions(tmp_path / "kept") == {1}  # bytes are moved as they are, unless it is asked for

    done = tenuto("migrate", f"{source}", f"{target}/", "--format")
    assert done.code == 0, done.err
    assert versions(target) == {2}
    assert versions(source) == {1}
    listed = {}
    for folder in (source, target):
        monkeypatch.setenv("TENUTO_STORE", str(folder))
        assert tenuto("check").code == 0
        sessions = tenuto("ls", "--json").json["sessions"]
        keys = ("id", "name", "turns", "tokens", "generation", "parent", "pins")
        listed[folder] = {tuple(str(each.get(key)) for key in keys) for each in sessions}
        assert {each["name"] for each in sessions} == LISTED
        assert "Tell me of the old lighthouse keeper" in tenuto("show", "tea").out
    assert listed[source] == listed[target]

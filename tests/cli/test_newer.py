"""What a newer build stored, on the command line: refused by the name of what is unknown, and left alone."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ProblemsFound, UnknownFeature, UnknownVersion
from serialization.blobs import BlobClass, BlobId
from sessions.names import SESSIONS
from sessions.stores.disk import DiskStore
from tests.cli.conftest import Tenuto
from tests.serialization.spelling import record_of, written


def test_every_command_names_the_feature_and_leaves_the_session(tenuto: Tenuto, tmp_path: Path) -> None:
    for name in ("theirs", "mine"):
        assert tenuto("chat", "--name", name, "--max-tokens", "4", stdin="hello\n").code == 0
    store = DiskStore(tmp_path / "store")
    (ref,) = (ref for ref, _ in store.list_refs(SESSIONS) if ref.endswith(_id(tenuto, "theirs")))
    old = store.read(ref)
    assert old is not None
    record = {**record_of(bytes(store.get(BlobId(old.decode())))), "features": ["zebra"]}
    new = store.put(BlobClass.MANIFEST, written(record)).encode()
    assert store.swap(ref, old, new)

    for command in (("resume", "theirs", "-p", "x"), ("show", "theirs"), ("rm", "theirs"), ("gc",)):
        done = tenuto(*command)
        assert done.code == UnknownFeature.exit_code
        assert "'zebra'" in done.err
    for command in (("ls",), ("check",), ("check", "--repair")):
        done = tenuto(*command)
        assert done.code == ProblemsFound.exit_code
        assert "'zebra'" in done.out + done.err
        assert "repaired" not in done.out
    assert "mine" in tenuto("ls").out
    assert store.read(ref) == new
    assert tenuto("resume", "mine", "-p", "x", "--max-tokens", "4").code == 0


def test_an_archive_of_a_newer_build_is_refused_by_its_version(tenuto: Tenuto, tmp_path: Path) -> None:
    assert tenuto("chat", "--name", "tea", "--max-tokens", "4", stdin="hello\n").code == 0
    assert tenuto("export", "tea", "tea.tenuto").code == 0
    path = tmp_path / "tea.tenuto"
    path.write_bytes(path.read_bytes()[:7] + b"\x09" + path.read_bytes()[8:])
    done = tenuto("import", "tea.tenuto", "--name", "again")
    assert done.code == UnknownVersion.exit_code
    assert "version 9" in done.err


def _id(tenuto: Tenuto, name: str) -> str:
    listed = tenuto("ls", "--json").json["sessions"]
    return str(next(each["id"] for each in listed if each["name"] == name))

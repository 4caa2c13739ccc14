"""`tenuto migrate` at the command line: what it says, and what its exit codes mean."""

from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path

import pytest

from serialization.blobs import BlobClass
from sessions.catalog import Catalog
from sessions.stores.open import open_store
from tests.cli.conftest import Tenuto
from tests.sessions.migrate.places import archives, fill, put_session


@pytest.fixture
def url(tmp_path: Path) -> str:
    with closing(open_store(str(tmp_path / "there"))) as store:
        fill(store)
    return str(tmp_path / "there")


def whole(url: str) -> dict[str, bytes]:
    with closing(open_store(url)) as store:
        return archives(store)


def test_a_whole_store_is_planned_moved_and_known(tenuto: Tenuto, url: str, tmp_path: Path) -> None:
    planned = tenuto("migrate", "--dry-run", url, "new/")
    assert planned.code == 0
    assert "kept: sessions, 4" in planned.out
    assert "dropped: marks of deleted sessions, 1" in planned.out
    assert not (tmp_path / "new").exists()
    moved = tenuto("migrate", url, "new/")
    assert (moved.code, moved.out) == (0, "")
    assert "moved 4 sessions and 1 kept turn" in moved.err
    assert whole("new") == whole(url)
    assert "5 were there already" in tenuto("migrate", url, "new").err


def test_programs_are_told_the_same(tenuto: Tenuto, url: str) -> None:
    planned = tenuto("migrate", "--dry-run", "--json", url, "new/").json
    assert planned["num_sessions"] == 4
    assert {"fate", "what", "count", "why", "nbytes", "examples"} == set(planned["items"][0])
    moved = tenuto("migrate", "--json", url, "new/").json
    assert (moved["num_sessions"], moved["num_pins"], moved["problems"]) == (4, 1, [])


def test_a_damaged_session_makes_the_exit_code_and_the_rest_arrives(tenuto: Tenuto, url: str) -> None:
    with closing(open_store(url)) as store:
        catalog = Catalog(store)
        lost = catalog.session(catalog.find("own"))
        rows = next(ref.blob for ref in lost.manifest.blobs() if ref.blob.startswith(BlobClass.ROWS))
        store.delete_blob(rows, 0)
    moved = tenuto("migrate", url, "new/")
    assert moved.code == 58
    assert lost.ref in moved.err
    assert "blobs are gone" in moved.err
    assert len(whole("new")) == 4


def test_clashes_end_it_with_their_own_code(tenuto: Tenuto, url: str) -> None:
    with closing(open_store("new")) as store:
        put_session(store, 9, "tea")
    refused = tenuto("migrate", url, "new")
    assert refused.code == 52
    assert "--skip" in refused.err
    assert "clash" in tenuto("migrate", "-n", url, "new").out
    assert len(whole("new")) == 1
    assert tenuto("migrate", "--rename", url, "new").code == 0
    assert len(whole("new")) == 6


def test_one_session_goes_by_archives_and_streams(
    tenuto: Tenuto, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tenuto("migrate", f"{url}#tea", "tea.tenuto").code == 0
    assert "exists already" in tenuto("migrate", f"{url}#own", "tea.tenuto").err
    assert tenuto("migrate", "-f", f"{url}#tea", "tea.tenuto").code == 0
    data = (tmp_path / "tea.tenuto").read_bytes()

    class Stdin:
        buffer = io.BytesIO(data)

    monkeypatch.setattr(io, "StringIO", lambda text: Stdin())  # what the fixture gives a command as stdin
    moved = tenuto("migrate", "-", "session:cup")
    assert moved.code == 0
    assert tenuto("show", "cup").code == 0
    assert moved.out.strip() == tenuto("show", "cup", "--json").json["id"]


def test_the_store_in_use_is_an_end_too(tenuto: Tenuto, url: str, tmp_path: Path) -> None:
    assert tenuto("migrate", url, "store:").code == 0
    assert whole(str(tmp_path / "store")) == whole(url)
    assert tenuto("migrate", "session:tea", "pin.tenuto").code == 0
    assert tenuto("migrate", "pin:first-cup", "session:second-cup").code == 0
    assert "second-cup" in tenuto("ls").out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nothing", "new/"), 2, "no file or folder"),
        (("there", "new"), 2, "not clear"),
        (("there", "one.tenuto"), 2, "STORE#NAME"),
        (("there", "./there/"), 2, "the same store"),
        (("there#nobody", "one.tenuto"), 51, "nobody"),
        (("there", "new/", "--cut", "5"), 2, "--cut"),
        (("there#tea", "new/", "--all-tenants"), 2, "--all-tenants"),
        (("there", "new/", "--tenant", "ann"), 51, "nothing of ann"),
        (("there#tea", "state.bin"), 2, "--to"),
        (("there#tea", "state.bin", "--to", "llama"), 35, "was made with"),
        (("words.txt", "session:x"), 39, ""),
        (("words.txt", "session:x", "--tokens", "words.txt"), 2, "no list of token ids"),
        (("words.txt", "session:x", "--trust", "--reread"), 2, "either"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tenuto: Tenuto, url: str, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "words.txt").write_text("these are words, and no state of anything\n" * 20)
    before = sorted(path for path in tmp_path.iterdir())
    done = tenuto("migrate", *arguments)
    assert done.code == code, done.err
    assert said in done.err
    assert done.err.startswith("tenuto: ")
    assert done.err.count("\n") == 1
    left = {path.name for path in tmp_path.iterdir()} - {path.name for path in before}
    assert left <= {"store"}, "something is left"


def test_every_tenant_whose_name_is_known_is_moved_and_the_others_are_told_of(
    tenuto: Tenuto, url: str, tmp_path: Path
) -> None:
    for tenant in ("ann", "bob"):
        with closing(open_store(url, tenant)) as store:
            put_session(store, 5, "hers", tenant=tenant)
    alone = tenuto("migrate", url, "alone/")
    assert "2 tenants more there: see --all-tenants" in alone.err
    assert "more there" not in tenuto("migrate", url, "alone/", "--tenant", "ann").err
    monkeys = str(tmp_path / "keys")
    assert tenuto("keys", "create", "--tenant", "ann", "--keys", monkeys).code == 0
    moved = tenuto("migrate", url, "new/", "--all-tenants", "--keys", monkeys)
    assert moved.code == 0
    assert "1 tenant more" in moved.err
    with closing(open_store("new", "ann")) as store:
        assert len(archives(store)) == 1
    assert len(whole("new")) == 5


def test_what_arrived_is_verified_with_the_model(tenuto: Tenuto, tmp_path: Path) -> None:
    assert tenuto("chat", "--name", "tea", "--max-tokens", "6", "--ctx", "512", stdin="tell me\n").code == 0
    moved = tenuto("migrate", "session:tea", "new/", "--verify", "2", "--json")
    assert moved.code == 0, moved.err
    first, end = json.JSONDecoder().raw_decode(moved.out)
    verdict = json.loads(moved.out[end:])
    assert first["num_sessions"] == 1
    assert [each["verdict"] for each in verdict] == ["sound"]
    coarser = tenuto("migrate", "session:tea", "session:coarse", "--type-k", "q8_0", "--verify", "1")
    assert coarser.code == 0, coarser.err
    assert "no drift" in coarser.out
    assert "q8_0" in tenuto("migrate", "-n", "session:tea", "session:x", "--type-v", "q8_0").out

"""Keys on the command line: who may come in, what is sealed, and what goes for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.errors import Erased, KeyFileRefused, KeyRefused, SealRefused, UsageError
from tests.cli.conftest import Tenuto
from tests.sessions.sealing import files

SHORT = ("--max-tokens", "8")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for keys, as the environment tells it."""
    monkeypatch.setenv("TENUTO_KEYS", str(tmp_path / "keys"))
    return tmp_path / "keys"


@pytest.fixture
def master(tenuto: Tenuto, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A master key in a file, as the environment tells it."""
    path = tmp_path / "secret" / "master"
    assert tenuto("keys", "create", "--master", str(path)).code == 0
    monkeypatch.setenv("TENUTO_MASTER_KEY_FILE", str(path))
    return path


def said(tenuto: Tenuto) -> None:
    done = tenuto("chat", "--name", "first", *SHORT, stdin="a secret word: aardvark\n")
    assert done.code == 0, done.err


def stored(folder: Path) -> bytes:
    return b"".join(files(folder))


# --- API keys -------------------------------------------------------------------------------


def test_an_api_key_is_shown_once(tenuto: Tenuto, keys: Path) -> None:
    done = tenuto("keys", "create", "--tenant", "acme")
    assert done.code == 0, done.err
    text = done.out.strip()
    assert text.startswith("tnt_")
    listed = tenuto("keys", "list")
    assert "acme" in listed.out
    assert text.split("_")[1] in listed.out
    assert text[-4:] not in listed.out + tenuto("keys", "list", "--json").out
    assert text[-52:].encode() not in stored(keys)


def test_keys_are_listed_and_revoked_by_their_ids(tenuto: Tenuto, keys: Path) -> None:
    made = [tenuto("keys", "create", "--tenant", tenant, "--json").json for tenant in ("acme", "zeta")]
    listed = tenuto("keys", "list", "--json").json["api_keys"]
    assert [(key["id"], key["tenant"]) for key in listed] == [(key["id"], key["tenant"]) for key in made]
    assert all(set(key) == {"id", "tenant", "created"} for key in listed)
    assert tenuto("keys", "revoke", made[0]["id"], "--json").json == {"revoked": [made[0]["id"]]}
    assert [key["tenant"] for key in tenuto("keys", "list", "--json").json["api_keys"]] == ["zeta"]
    assert tenuto("keys", "revoke", made[0]["id"]).code == KeyRefused.exit_code


@pytest.mark.parametrize(
    "arguments",
    [
        ("create",),
        ("create", "--tenant", "a", "--master", "b"),
        ("create", "--tenant", "../a"),
        ("create", "--tenant", "a", "--per-session"),
        ("rotate",),
        ("rotate", "--tenant", "a", "--master"),
        ("rotate", "--tenant", "default"),
        ("revoke",),
    ],
)
def test_what_makes_no_sense_is_refused(tenuto: Tenuto, keys: Path, arguments: tuple[str, ...]) -> None:
    done = tenuto("keys", *arguments)
    assert done.code == UsageError.exit_code
    assert done.err.count("\n") == 1


# --- sealed stores --------------------------------------------------------------------------


def test_with_a_master_key_a_new_store_is_sealed(
    tenuto: Tenuto, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert master.stat().st_mode & 0o777 == 0o600
    said(tenuto)
    assert b"aardvark" not in stored(tmp_path / "store")
    assert "aardvark" in tenuto("show", "first").out
    assert tenuto("resume", "first", "-p", "more", "--json", *SHORT).json["restored"]["recomputed"] == 0
    assert tenuto("check").code == 0
    monkeypatch.delenv("TENUTO_MASTER_KEY_FILE")
    refused = tenuto("ls")
    assert refused.code == SealRefused.exit_code
    assert "--master-key" in refused.err
    assert refused.err.count("\n") == 1
    assert tenuto("ls", "--master-key", str(master)).code == 0
    monkeypatch.setenv("TENUTO_MASTER_KEY", master.read_text())
    assert tenuto("ls").code == 0
    assert tenuto("ls", "--master-key", str(master)).code == UsageError.exit_code


def test_a_store_in_the_clear_stays_in_the_clear(tenuto: Tenuto, keys: Path, tmp_path: Path) -> None:
    said(tenuto)
    master = tmp_path / "master"
    tenuto("keys", "create", "--master", str(master))
    done = tenuto("ls", "--master-key", str(master))
    assert done.code == SealRefused.exit_code
    assert "in the clear" in done.err
    assert b"aardvark" in stored(tmp_path / "store")
    assert tenuto("ls").code == 0


def test_a_master_key_that_others_can_read_is_refused(tenuto: Tenuto, master: Path) -> None:
    master.chmod(0o644)
    done = tenuto("ls")
    assert done.code == KeyFileRefused.exit_code
    assert "chmod 600" in done.err
    assert tenuto("keys", "create", "--master", str(master)).code == KeyFileRefused.exit_code


def test_a_wrong_master_key_says_nothing_of_itself(
    tenuto: Tenuto, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_MASTER_KEY", "not a key but a password")
    done = tenuto("ls")
    assert done.code == KeyFileRefused.exit_code
    assert "password" not in done.err


def test_data_keys_are_rotated_in_place(tenuto: Tenuto, master: Path, tmp_path: Path) -> None:
    said(tenuto)
    before = stored(tmp_path / "store" / "tenants")
    done = tenuto("keys", "rotate", "--tenant", "default", "--drop-old", "--json")
    assert done.code == 0, done.err
    assert done.json["blobs"] > 0
    assert done.json["refs"] > 0
    assert done.json["problems"] == []
    assert stored(tmp_path / "store" / "tenants") != before
    assert "aardvark" in tenuto("show", "first").out
    assert "sealed" in tenuto("keys", "rotate", "--tenant", "default").err


def test_master_keys_are_rotated_without_a_look_at_stores(
    tenuto: Tenuto, master: Path, tmp_path: Path
) -> None:
    said(tenuto)
    old = master.read_text()
    shutil.move(tmp_path / "store", tmp_path / "aside")
    assert tenuto("keys", "rotate", "--master", "--json").json == {"tenants": 1}
    assert master.read_text() != old
    assert master.read_text().endswith(old)
    assert tenuto("keys", "rotate", "--master", "--drop-old").code == 0
    assert len(master.read_text().split()) == 1
    shutil.move(tmp_path / "aside", tmp_path / "store")
    assert "aardvark" in tenuto("show", "first").out
    master.write_text(old)
    assert tenuto("ls").code == SealRefused.exit_code


def test_a_master_key_in_the_environment_is_rotated_by_hand(
    tenuto: Tenuto, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = "ab" * 32, "cd" * 32
    monkeypatch.setenv("TENUTO_MASTER_KEY", old)
    said(tenuto)
    monkeypatch.setenv("TENUTO_MASTER_KEY", f"{new} {old}")
    assert tenuto("keys", "rotate", "--master", "--json").json == {"tenants": 1}
    monkeypatch.setenv("TENUTO_MASTER_KEY", new)
    assert "aardvark" in tenuto("show", "first").out
    monkeypatch.setenv("TENUTO_MASTER_KEY", old)
    assert tenuto("ls").code == SealRefused.exit_code


# --- erasing --------------------------------------------------------------------------------


def test_an_erased_tenant_cannot_be_read_from_a_backup(tenuto: Tenuto, master: Path, tmp_path: Path) -> None:
    said(tenuto)
    tenuto("keys", "create", "--tenant", "default")
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    assert "aardvark" in tenuto("show", "first", "--store", str(tmp_path / "backup")).out
    done = tenuto("erase", "--tenant", "default", "--yes", "--json")
    assert done.code == 0, done.err
    assert done.json == {"tenant": "default", "keys_destroyed": True, "api_keys_revoked": 1}
    for store in ("store", "backup"):
        refused = tenuto("ls", "--store", str(tmp_path / store))
        assert refused.code == Erased.exit_code
        assert "destroyed" in refused.err
    assert "erased" in tenuto("keys", "list").out
    assert tenuto("keys", "create", "--tenant", "default").code == 0
    assert tenuto("ls", "--json").json["sessions"] == []
    assert tenuto("ls", "--store", str(tmp_path / "backup")).code == SealRefused.exit_code


def test_erasing_what_is_in_the_clear_says_that_backups_are_not_covered(
    tenuto: Tenuto, keys: Path, tmp_path: Path
) -> None:
    said(tenuto)
    done = tenuto("erase", "--tenant", "default")
    assert done.code == 0
    assert "backups" in done.err
    assert "not covered" in done.err
    assert b"aardvark" not in stored(tmp_path / "store")
    assert tenuto("ls", "--json").json["sessions"] == []


def test_one_session_is_erased_where_each_has_its_key(tenuto: Tenuto, master: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert tenuto("keys", "create", "--tenant", "default", "--per-session").code == 0
    assert tenuto("keys", "create", "--tenant", "other").code == 0
    late = tenuto("keys", "create", "--tenant", "other", "--per-session")
    assert (late.code, len(tenuto("keys", "list", "--json").json["api_keys"])) == (UsageError.exit_code, 3)
    assert "session" in tenuto("keys", "list").out
    said(tenuto)
    tenuto("fork", "first", "second")
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    assert tenuto("erase", "--session", "first", "--yes").code == 0
    assert [info["name"] for info in tenuto("ls", "--json").json["sessions"]] == ["second"]
    assert "aardvark" in tenuto("show", "second").out
    assert tenuto("show", "first", "--store", str(tmp_path / "backup")).code != 0
    assert "aardvark" in tenuto("show", "second", "--store", str(tmp_path / "backup")).out


@pytest.mark.parametrize(
    "arguments", [(), ("--tenant", "a", "--session", "b"), ("--tenant", "../a"), ("--session", "first")]
)
def test_an_erasure_that_makes_no_sense_is_refused(
    tenuto: Tenuto, keys: Path, arguments: tuple[str, ...]
) -> None:
    said(tenuto)
    assert tenuto("erase", *arguments).code == UsageError.exit_code
    assert "aardvark" in tenuto("show", "first").out

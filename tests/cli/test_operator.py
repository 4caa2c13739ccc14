"""What an operator asks of a store: diff, verify, stats, and everything for one tenant."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cli.app import App
from cli.output import Output
from engine.errors import Corrupt, Drifted, FingerprintMismatch, NoCheckpoint, SessionNotFound, UsageError
from engine.state import Rows
from serialization.blobs import BlobClass, parse_blob_id
from serialization.snapshot import read_state, write_state
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.lease import acquire
from sessions.manager import SessionManager
from sessions.names import session_ref
from sessions.stores.open import open_store
from tests.cli.conftest import Tenuto
from tests.tiny import write_tiny

SHORT = ("--max-tokens", "8", "--temp", "0")


@pytest.fixture
def session(tenuto: Tenuto) -> str:
    """The id of a stored session of two turns, called `first`."""
    done = tenuto("chat", "--name", "first", *SHORT, stdin="hello\nand then?\n")
    assert done.code == 0, done.err
    found: str = tenuto("inspect", "first", "--json").json["session"]
    return found


# --- diff -----------------------------------------------------------------------------------------


def test_diff_tells_where_two_sessions_part(tenuto: Tenuto, session: str) -> None:
    tenuto("fork", "first", "second")
    assert tenuto("diff", "first", "second", "--json").json["same_conversation"] is True
    tenuto("resume", "second", "-p", "otherwise", *SHORT)
    done = tenuto("diff", "first", "second", "--json")
    assert done.code == 0
    found = done.json
    assert found["same_conversation"] is False
    assert found["tokens"]["common"] == found["a"]["tokens"]
    assert found["messages"]["common"] == 4
    assert [message["text"] for message in found["messages"]["b"]][:1] == ["otherwise"]
    assert found["b"]["forked_from"]["session"] == session
    said = tenuto("diff", "first", "second").out
    assert f"tokens: the first {found['tokens']['common']:,} are the same" in said
    assert "B has 2 others, first [user] otherwise" in said


def test_diff_takes_turns_pins_and_archives(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    tenuto("save", "first", "kept")
    tenuto("export", "first")
    for a, b, same in (
        ("first@1", "first", False),
        ("pin:kept", "first", True),
        ("first.tenuto", "pin:kept", True),
        (str(tmp_path / "first.tenuto"), "first@1", False),
    ):
        done = tenuto("diff", a, b, "--json")
        assert (done.code, done.json["same_conversation"]) == (0, same), (a, b)
    assert tenuto("diff", "first", "first@9").code == SessionNotFound.exit_code
    assert tenuto("diff", "first", "nope.tenuto").code == 1
    archive = tmp_path / "first.tenuto"
    archive.write_bytes(archive.read_bytes()[:-1])
    assert tenuto("diff", "first", "first.tenuto").code == Corrupt.exit_code


# --- verify ---------------------------------------------------------------------------------------


def test_verify_says_how_it_asked_and_that_nothing_drifted(tenuto: Tenuto, session: str) -> None:
    done = tenuto("verify", "first", "--logits", "5", "--seed", "7", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["verdict"] == "sound"
    assert found["positions"]["seed"] == 7
    assert found["positions"]["of"] == found["tokens"]
    assert len(found["samples"]) == 5
    assert found["top1_agreement"] == 1.0
    assert all(0 <= sample["max"] <= found["limit"] for sample in found["samples"])
    again = tenuto("verify", "first", "--logits", "5", "--seed", "7", "--json").json
    assert [each["length"] for each in again["samples"]] == [each["length"] for each in found["samples"]]
    said = tenuto("verify", "first")
    assert (said.code, said.err) == (0, "")
    assert "drawn by seed 0" in said.out
    assert said.out.splitlines()[-1].startswith("no drift: logits differ by up to ")


def spoil(store_folder: Path) -> None:
    """Commit `first` anew with other rows in its first layer; every digest is right."""
    with closing(open_store(str(store_folder))) as store:
        manifest = SessionManager(store).manifest("first")
        state = read_state(store, manifest)
        runs = []
        for run in state.rows:
            other = run.parts[0].clone()
            other.view(torch.bfloat16).mul_(-5)
            runs.append(Rows(run.kind, run.start, run.stop, (other, *run.parts[1:])))
        written = write_state(store, replace(state, rows=tuple(runs)), None, 0)
        ref = session_ref(manifest.session)
        old = store.read(ref)
        assert old is not None
        spoiled = replace(
            manifest,
            chunks=written.chunks,
            generation=manifest.generation + 1,
            parent=parse_blob_id(old.decode()),
        )
        assert store.swap(ref, old, store.put(BlobClass.MANIFEST, spoiled.encode()).encode())


def test_rows_that_say_otherwise_end_verify_with_its_own_code(
    tenuto: Tenuto, session: str, tmp_path: Path
) -> None:
    spoil(tmp_path / "store")
    assert tenuto("check").code == 0  # its bytes are those that were written
    done = tenuto("verify", "first", "--logits", "9", "--json")
    assert done.code == Drifted.exit_code
    assert done.json["verdict"] == "drifted"
    worst = max(done.json["parts"], key=lambda part: part["max"])
    assert worst["name"] == done.json["parts"][0]["name"]
    assert "drifted: logits differ by up to" in done.err
    assert tenuto("verify", "first", "--logits", "9", "--drift", "1000").code == 0
    assert tenuto("verify", "first@2").code == 0  # the turn before is as it was


def test_verify_refuses_what_it_cannot_ask(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", seed=9)
    assert tenuto("verify", "first", "-m", str(other)).code == FingerprintMismatch.exit_code
    assert tenuto("verify", "first", "--draft", "ngram").code == UsageError.exit_code
    assert tenuto("verify", "first", "--logits", "0").code == UsageError.exit_code
    assert tenuto("gc", "--rows-ttl", "0s").code == 0
    assert tenuto("verify", "first").code == NoCheckpoint.exit_code


# --- one tenant -----------------------------------------------------------------------------------


def test_every_command_works_on_the_tenant_that_is_said(tenuto: Tenuto, session: str) -> None:
    ann = ("--tenant", "ann")
    assert tenuto("ls", "--json", *ann).json["sessions"] == []
    assert tenuto("chat", "--name", "hers", *SHORT, *ann, stdin="hello\n").code == 0
    (hers,) = tenuto("ls", "--json", *ann).json["sessions"]
    assert hers["name"] == "hers"
    assert tenuto("show", "hers").code == SessionNotFound.exit_code
    assert tenuto("show", "first", *ann).code == SessionNotFound.exit_code
    assert tenuto("resume", "hers", "-p", "more", "--json", *SHORT, *ann).json["restored"]["recomputed"] == 0
    assert tenuto("verify", "hers", *ann).code == 0
    for verb in (("check",), ("check", "--repair"), ("gc", "--dry-run"), ("gc", "--session-ttl", "0s")):
        assert tenuto(*verb, *ann).code == 0
    assert tenuto("ls", "--json", *ann).json["sessions"] == []
    assert [info["name"] for info in tenuto("ls", "--json").json["sessions"]] == ["first"]
    assert tenuto("ls", "--tenant", "../ann").code == UsageError.exit_code


def test_a_tenant_can_be_said_in_the_environment(
    tenuto: Tenuto, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_TENANT", "ann")
    assert tenuto("ls", "--json").json["sessions"] == []


# --- stats ----------------------------------------------------------------------------------------


def test_stats_agree_with_ls(tenuto: Tenuto, session: str) -> None:
    tenuto("fork", "first", "second")
    listed, found = tenuto("ls", "--json").json, tenuto("stats", "--json").json
    (tenant,) = found["tenants"]
    assert tenant["tenant"] == "default"
    assert tenant["num_sessions"] == len(listed["sessions"]) == 2
    assert tenant["num_turns"] == sum(info["turns"] for info in listed["sessions"])
    assert tenant["num_tokens"] == sum(info["length"] for info in listed["sessions"])
    assert tenant["classes"]["rows"]["shared"] == listed["usage"]["rows_bytes"]
    assert tenant["sharing"] == 2.0
    said = tenuto("stats").out
    assert said.startswith("2 sessions (1 fork), 0 kept turns, 4 turns, ")
    assert "compression: " in said


def test_stats_of_all_tenants_are_those_whose_names_are_known(
    tenuto: Tenuto, session: str, tmp_path: Path
) -> None:
    for tenant in ("ann", "bob"):
        assert tenuto("chat", *SHORT, "--tenant", tenant, stdin="hello\n").code == 0
    assert tenuto("keys", "create", "--tenant", "ann").code == 0
    assert tenuto("keys", "create", "--tenant", "carl").code == 0  # who has nothing here
    done = tenuto("stats", "--all-tenants", "--json")
    assert [each["tenant"] for each in done.json["tenants"]] == ["ann", "default"]
    assert done.json["unknown_tenants"] == 1
    assert len(list((tmp_path / "store" / "tenants").iterdir())) == 3  # none was made by looking
    assert "1 tenant more here" in tenuto("stats", "--all-tenants").err
    assert tenuto("stats", "--all-tenants", "--tenant", "ann").code == UsageError.exit_code


def test_a_password_in_a_stores_address_is_not_told() -> None:
    def told(url: str) -> str:
        return App(Output(quiet=True, as_json=False), url).address

    assert told("redis://ann:secret@host:1/0") == "redis://host:1/0"
    assert told("redis://host:1/0") == "redis://host:1/0"
    assert told("tiered:disk=1G@/tier,rediss://:secret@host") == "tiered:disk=1G@/tier,rediss://host"
    assert told("tiered:disk=1G@/tier,/store") == "tiered:disk=1G@/tier,/store"


# --- gc -------------------------------------------------------------------------------------------


def test_a_dry_run_tells_what_would_come_of_it_with_the_next_run_too(tenuto: Tenuto, session: str) -> None:
    dry = ("gc", "--dry-run", "--session-ttl", "0s")
    plan = tenuto(*dry, "--json").json
    assert plan["expired"] == [session]
    assert plan["later_nbytes"] > 0
    said = tenuto(*dry).out
    assert re.search(
        r"^would free \d+ blobs, .*; [\d.]+ kB of these would be freed by the next gc$", said, re.M
    )
    assert tenuto("show", "first").code == 0  # it was a dry run
    assert "are freed by the next gc" in tenuto("gc", "--session-ttl", "0s").err
    assert tenuto("gc", "--dry-run", "--json").json["later_nbytes"] == 0


# --- sealed ---------------------------------------------------------------------------------------


def test_all_of_them_work_on_a_sealed_store(
    tenuto: Tenuto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = tmp_path / "master"
    assert tenuto("keys", "create", "--master", str(master)).code == 0
    monkeypatch.setenv("TENUTO_MASTER_KEY_FILE", str(master))
    monkeypatch.setenv("TENUTO_KEYS", str(tmp_path / "keys"))
    assert tenuto("chat", "--name", "first", *SHORT, stdin="hello\nand then?\n").code == 0
    assert tenuto("verify", "first@1").code == 0
    assert tenuto("export", "first").code == 0
    found = tenuto("diff", "first", "first.tenuto", "--json").json
    assert (found["same_conversation"], found["bytes"], found["rows_shared"]) == (True, None, None)
    assert "equal rows have two names" in tenuto("diff", "first", "first.tenuto").out
    assert tenuto("diff", "first@1", "first", "--json").json["bytes"]["shared"] > 0  # the first turn's
    (tenant,) = tenuto("stats", "--all-tenants", "--json").json["tenants"]
    assert (tenant["tenant"], tenant["num_sessions"], tenant["num_turns"]) == ("default", 1, 2)
    session = tenuto("inspect", "first", "--json").json["session"]
    ring = Keyring(tmp_path / "keys", MasterKeys.read(master))
    store = open_store(str(tmp_path / "store"), keyring=ring)
    with closing(store), acquire(store, session, "somebody"):
        watched = tenuto("top", "--once", "--json").json
    assert [each["holder"] for each in watched["writing"]] == ["somebody"]
    assert tenuto("check").code == tenuto("gc", "--dry-run").code == 0

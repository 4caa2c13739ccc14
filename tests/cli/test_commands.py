"""Every command, end to end, on a tiny model and a store on disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Corrupt, DeviceMissing, NoChatTemplate, ProblemsFound, SessionNotFound, UsageError
from sessions.stores.open import open_store
from tests.cli.conftest import Tenuto

SHORT = ("--max-tokens", "8")


@pytest.fixture
def session(tenuto: Tenuto) -> str:
    """The id of a stored session of two turns, called `first`."""
    done = tenuto("chat", "--name", "first", *SHORT, stdin="hello\nand then?\n")
    assert done.code == 0, done.err
    found: str = only(tenuto)["id"]
    return found


def only(tenuto: Tenuto) -> dict[str, Any]:
    (info,) = tenuto("ls", "--json").json["sessions"]
    found: dict[str, Any] = info
    return found


def test_a_chat_is_stored_turn_by_turn_and_resumed_without_reading(tenuto: Tenuto, session: str) -> None:
    before = only(tenuto)
    assert (before["name"], before["turns"]) == ("first", 2)
    done = tenuto("resume", "first", "-p", "more", "--json", *SHORT)
    assert done.code == 0, done.err
    assert (done.json["session"], done.json["saved"]) == (session, True)
    restored = done.json["restored"]
    assert (restored["restored"], restored["recomputed"]) == (before["length"], 0)
    assert restored["reason"] == "exact"
    assert only(tenuto)["turns"] == 3


def test_after_a_resume_one_line_tells_the_truth(tenuto: Tenuto, session: str) -> None:
    length = only(tenuto)["length"]
    done = tenuto("chat", "-c", stdin="")
    assert done.out == ""
    assert done.err.startswith(f"resumed {length:,} tokens in ")
    assert done.err.endswith(" ms (recomputed 0)\n")


def test_a_session_finds_its_own_model(tenuto: Tenuto, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENUTO_MODEL")
    assert tenuto("resume", session, "-p", "more", *SHORT).code == 0


def test_a_session_keeps_its_cache_types(tenuto: Tenuto) -> None:
    assert tenuto("chat", "--type-k", "q8_0", "--type-v", "f16", *SHORT, stdin="hello\n").code == 0
    assert "recomputed 0" in tenuto("chat", "-c").err


def test_a_kept_turn_is_loaded_as_often_as_one_likes(tenuto: Tenuto, session: str) -> None:
    assert tenuto("save", "first", "chapter").code == 0
    ids = {tenuto("load", "chapter").out.strip() for _ in range(2)}
    assert len(ids | {session}) == 3
    assert tenuto("resume", ids.pop(), "-p", "x", "--json", *SHORT).json["restored"]["recomputed"] == 0
    assert tenuto("rm", "--pin", "chapter").code == 0
    assert tenuto("load", "chapter").code == SessionNotFound.exit_code


def test_fork_rewind_rename_and_rm(tenuto: Tenuto, session: str) -> None:
    copy = tenuto("fork", session, "second", "--json").json
    assert copy["parent"] is not None
    assert tenuto("rewind", "second", "--json").json["turns"] == 1
    assert tenuto("rename", "second", "third", "--json").json["name"] == "third"
    assert tenuto("rm", "third", "first").code == 0
    assert tenuto("ls", "--json").json["sessions"] == []
    assert tenuto("show", session).code == SessionNotFound.exit_code


def test_rm_deletes_nothing_for_a_wrong_name_and_each_thing_once(tenuto: Tenuto, session: str) -> None:
    tenuto("save", "first", "kept")
    assert tenuto("rm", "first", "--pin", "nope").code == SessionNotFound.exit_code
    assert tenuto("show", "first").code == 0
    assert tenuto("rm", "first", session, "--pin", "kept", "--pin", "kept").code == 0


def test_show_and_inspect_print_what_was_said_and_how_it_is_stored(tenuto: Tenuto, session: str) -> None:
    said = tenuto("show", "first").out
    assert "[user]\nhello\n" in said
    shown = tenuto("show", "first", "--json").json
    assert [m["role"] for m in shown["messages"]] == ["user", "assistant"] * 2
    found = tenuto("inspect", "first", "--json").json
    assert len(found["tokens"]) == shown["length"] == found["length"]
    assert tenuto("inspect", "first").out.startswith(f"session       {session}")


def test_ls_adds_up(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    with closing(open_store(str(tmp_path / "store"))) as store:
        assert list(store.list_refs("session/"))  # now the index stays open, and its log as it is
        usage = tenuto("ls", "--json").json["usage"]
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert usage["total"] == sum(path.stat().st_size for path in files)
    assert usage["total"] == sum(nbytes for part, nbytes in usage.items() if part != "total")
    assert tenuto("ls").out.splitlines()[0].startswith("ID ")


def test_ls_shows_a_larger_store_page_by_page(tenuto: Tenuto, session: str) -> None:
    for name in ("second", "third"):
        tenuto("fork", "first", name)
    whole = tenuto("ls", "--json").json["sessions"]
    first = tenuto("ls", "--limit", "2", "--json").json
    assert [info["name"] for info in first["sessions"]] == ["third", "second"]
    rest = tenuto("ls", "--limit", "2", "--after", first["after"].lower(), "--json").json
    assert ([info["id"] for info in rest["sessions"]], rest["after"]) == ([session], None)
    shown = tenuto("ls", "--limit", "2")
    assert f"tenuto ls --after {first['after']}" in shown.err
    assert len(shown.out.splitlines()) == 3
    assert tenuto("ls", "--limit", "2", "--all", "--json").json["sessions"] == whole
    assert tenuto("ls", "--after", "first").code == UsageError.exit_code


def test_an_export_is_imported_elsewhere_and_resumed(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    assert tenuto("export", "first").code == 0
    assert tenuto("export", "first").code == UsageError.exit_code  # it is there already
    other = ("--store", str(tmp_path / "other"))
    assert tenuto("import", "first.tenuto", "--name", "moved", *other).code == 0
    done = tenuto("resume", "moved", "-p", "x", "--json", *SHORT, *other)
    assert done.json["restored"]["recomputed"] == 0
    assert [path.name for path in tmp_path.glob(".*")] == []


def damage(tenuto: Tenuto, store: Path) -> None:
    """Another last byte in the first chunk of the session `first`."""
    needed = tenuto("inspect", "first", "--json").json["chunks"][0]["blobs"][0]["ref"]["blob"]
    digest = needed.rpartition("-")[2]
    (path,) = [path for path in store.rglob(f"*{digest[4:]}*") if path.is_file()]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_a_failed_export_leaves_nothing(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    damage(tenuto, tmp_path / "store")
    assert tenuto("export", "first", "out.tenuto").code == Corrupt.exit_code
    assert not list(tmp_path.glob("*out*"))
    assert not list(tmp_path.glob(".*"))


def test_check_finds_damage_and_repair_says_what_it_gave_up(
    tenuto: Tenuto, session: str, tmp_path: Path
) -> None:
    assert tenuto("check").code == 0
    damage(tenuto, tmp_path / "store")
    assert tenuto("resume", "first", "-p", "x", *SHORT).code == Corrupt.exit_code
    done = tenuto("check", "--json")
    assert done.code == ProblemsFound.exit_code
    assert [problem["kind"] for problem in done.json["problems"]] == ["corrupt"]
    assert "given up" in tenuto("check", "--repair").out
    assert tenuto("check").code == 0
    done = tenuto("resume", "first", "-p", "x", "--json", *SHORT)
    assert done.json["restored"]["recomputed"] > 0


def test_a_damaged_session_is_read_again_when_that_is_asked_for(
    tenuto: Tenuto, session: str, tmp_path: Path
) -> None:
    damage(tenuto, tmp_path / "store")
    done = tenuto("resume", "first", "-p", "x", "--recompute", "-q", *SHORT)
    assert done.code == 0
    assert done.err.startswith("resumed 0 tokens")  # -q does not hide it
    assert ": corrupt, " in done.err


def test_gc_says_what_it_would_do_before_it_does_it(tenuto: Tenuto, session: str) -> None:
    tenuto("rm", "first")
    assert tenuto("gc", "--dry-run", "--grace", "0.001").out.startswith("would free ")
    assert tenuto("gc", "--dry-run", "--json").json["blobs"] == []  # all younger than an hour
    done = tenuto("gc", "--grace", "0.001", "--json")
    assert done.code == 0
    assert done.json["num_blobs"] > 0


def test_run_answers_and_keeps_nothing(tenuto: Tenuto) -> None:
    done = tenuto("run", "hello", "--json", *SHORT, "--temp", "0")
    assert done.json["finish"] in {"length", "eos"}
    assert tenuto("run", "--raw", *SHORT, "--temp", "0", stdin="hello").code == 0
    assert tenuto("ls", "--json").json["sessions"] == []


def test_the_same_seed_says_the_same_words(tenuto: Tenuto) -> None:
    said = [tenuto("run", "hello", "--seed", seed, "--temp", "2", *SHORT).out for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]


def test_the_best_of_several_is_what_alone_it_would_have_been(tenuto: Tenuto) -> None:
    sampled = (*SHORT, "--temp", "2", "--seed", "5")
    done = tenuto("run", "hello", "--best-of", "3", "--json", *sampled)
    assert done.code == 0, done.err
    found = done.json["best_of"]
    means = [candidate["mean_logprob"] for candidate in found["candidates"]]
    assert found["chosen"] == means.index(max(means))
    assert found["candidates"][0]["seed"] == 5
    seed = str(found["candidates"][found["chosen"]]["seed"])
    alone = tenuto("run", "hello", *SHORT, "--temp", "2", "--seed", seed)
    assert alone.out == done.json["text"] + "\n"
    told = tenuto("run", "hello", "--best-of", "3", *sampled)
    assert told.out == alone.out
    assert told.err.startswith(f"reply {found['chosen'] + 1} of 3; mean log-probability of a token: -")
    assert tenuto("run", "hello", "--best-of", "3", "-q", *sampled).err == ""


@pytest.mark.parametrize("wrong", [("--temp", "0"), ("--draft", "ngram")])
def test_where_there_is_nothing_to_choose_from_the_best_is_not_asked_for(
    wrong: tuple[str, ...], tenuto: Tenuto
) -> None:
    done = tenuto("run", "hello", "--best-of", "3", "-m", "no-such-model", *wrong)
    assert (done.code, done.out) == (UsageError.exit_code, "")
    assert done.err.count("\n") == 1
    assert wrong[0] in done.err


def test_without_gpus_another_main_gpu_changes_nothing_and_a_gpu_is_one_clear_error(
    tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    greedy = ("run", "hello", *SHORT, "--temp", "0")
    plain = tenuto(*greedy)
    for chosen in (("--main-gpu", "3"), ("--main-gpu", "3", "--device", "cpu")):
        done = tenuto(*greedy, *chosen)
        assert (done.code, done.out) == (0, plain.out), done.err
    for chosen in (("--device", "cuda"), ("--main-gpu", "3", "--device", "cuda")):
        done = tenuto(*greedy, *chosen)
        assert (done.code, done.out) == (DeviceMissing.exit_code, "")
        assert done.err == "tenuto: device cuda: torch finds no CUDA GPU on this machine\n"
    assert DeviceMissing.exit_code == 25


def test_resume_of_nothing_and_chat_with_nothing_to_go_on_with(tenuto: Tenuto) -> None:
    assert tenuto("resume", "nope", "-p", "x").code == SessionNotFound.exit_code
    assert tenuto("chat", "-c").code == SessionNotFound.exit_code


def test_a_base_model_says_that_it_cannot_chat(
    tenuto: Tenuto, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny.read_bytes()
    base = tmp_path / "base.gguf"  # the same file with the key of its template renamed
    base.write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_templatx"))
    done = tenuto("chat", "-m", str(base), stdin="hello\n")
    assert done.code == NoChatTemplate.exit_code
    assert "--chat-template" in done.err
    chosen = ("--chat-template", "chatml", "-m", str(base))
    assert tenuto("chat", *chosen, *SHORT, stdin="hello\n").code == 0
    monkeypatch.delenv("TENUTO_MODEL")
    assert "recomputed 0" in tenuto("chat", "-c").err  # model and template are found again

"""A resume says in its one line what became of the draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Tenuto
from tests.tiny import write_tiny

SHORT = ("--max-tokens", "8")


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models that draft for the tiny one."""
    folder = tmp_path_factory.mktemp("drafts")
    one, two = (write_tiny(folder / f"{seed}.gguf", seed=seed, layers=2) for seed in (1, 2))
    return str(one), str(two)


@pytest.fixture
def chat(tenuto: Tenuto, drafts: tuple[str, str]) -> Tenuto:
    """With one session that was saved with a draft."""
    done = tenuto("chat", "--draft", drafts[0], *SHORT, stdin="hello\nand then?\n")
    assert done.code == 0, done.err
    return tenuto


def test_with_the_same_drafter_both_come_back(chat: Tenuto, drafts: tuple[str, str]) -> None:
    done = chat("chat", "-c", "--draft", drafts[0], *SHORT)
    assert done.err.endswith("(recomputed 0); draft restored\n")
    assert chat("chat", "-c", "-q", "--draft", drafts[0], *SHORT).err == "", "nothing is lacked"


def test_with_another_one_the_draft_is_rebuilt_which_is_never_silenced(
    chat: Tenuto, drafts: tuple[str, str]
) -> None:
    for quiet in ((), ("-q",)):
        done = chat("chat", "-c", "--draft", drafts[1], *quiet, *SHORT)
        assert "(recomputed 0); draft rebuilt: it was made by another drafter (weights = " in done.err


def test_without_one_it_waits_for_the_next_that_drafts(chat: Tenuto, drafts: tuple[str, str]) -> None:
    done = chat("chat", "-c", *SHORT, stdin="more\n")
    assert "(recomputed 0); draft unused: no drafter is in use\n" in done.err
    assert "draft unused: ngram keeps nothing\n" in chat("chat", "-c", "--draft", "ngram", *SHORT).err
    assert chat("chat", "-c", "--draft", drafts[0], *SHORT).err.endswith("; draft restored\n")


def test_of_a_session_that_was_never_drafted_for_it_is_rebuilt(
    tenuto: Tenuto, drafts: tuple[str, str]
) -> None:
    assert tenuto("chat", *SHORT, stdin="hello\n").code == 0
    assert "draft" not in tenuto("chat", "-c", *SHORT).err
    done = tenuto("chat", "-c", "--draft", drafts[0], *SHORT)
    assert done.err.endswith("; draft rebuilt: the state was saved without a draft\n")


def test_json_tells_it_too(chat: Tenuto, drafts: tuple[str, str]) -> None:
    session = chat("ls", "--json").json["sessions"][0]
    done = chat("resume", session["id"], "-p", "more", "--json", "--draft", drafts[0], *SHORT)
    restored = done.json["restored"]
    assert (restored["reason"], restored["draft"]) == ("exact", "restored")
    assert 0 < restored["draft_restored"] <= session["length"]


def test_inspect_shows_it(chat: Tenuto, tenuto: Tenuto) -> None:
    session = chat("ls", "--json").json["sessions"][0]["id"]
    (line,) = (line for line in chat("inspect", session).out.splitlines() if line.startswith("draft "))
    assert " tokens, " in line
    assert "blobs" in line
    data = chat("inspect", session, "--json").json
    assert data["features"] == ["draft", "pieces"]
    assert data["draft"]["length"] <= data["length"]
    assert data["draft"]["chunks"]


def test_inspect_of_a_session_without_one(tenuto: Tenuto, tiny: Path) -> None:
    assert tenuto("chat", *SHORT, stdin="hello\n").code == 0
    session = tenuto("ls", "--json").json["sessions"][0]["id"]
    assert "\ndraft         -\n" in tenuto("inspect", session).out
    data = tenuto("inspect", session, "--json").json
    assert (data["features"], data["draft"]) == ([], None)

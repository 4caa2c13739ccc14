"""Conversations of other programs at the command line: out to llama.cpp, back, and on as a chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tenuto
from tests.tiny import write_tiny


@pytest.fixture
def state(tenuto: Tenuto, tmp_path: Path) -> Path:
    """A chat of the session `tea`, as llama.cpp would have it."""
    said = tenuto("chat", "--name", "tea", "--max-tokens", "6", "--ctx", "512", stdin="tell me\n")
    assert said.code == 0, said.err
    gone = tenuto("migrate", "session:tea", "tea.bin", "--to", "llama")
    assert gone.code == 0, gone.err
    assert "-ctk f16 -ctv f16 -fa on" in gone.err + gone.out
    return tmp_path / "tea.bin"


def test_it_comes_back_and_goes_on_as_a_chat(tenuto: Tenuto, state: Path) -> None:
    planned = tenuto("migrate", "-n", str(state), "session:back")
    assert planned.code == 0, planned.err
    assert "kept: messages, 2; found by the chat template" in planned.out
    assert "recomputed: proof: last tokens, 8" in planned.out
    come = tenuto("migrate", str(state), "session:back")
    assert come.code == 0, come.err
    assert "computed the last 8 rows again" in come.err
    shown = tenuto("inspect", "back")
    assert "imported" in shown.out
    assert "proven by its last rows" in shown.out
    assert tenuto("show", "back", "--json").json["parent"] is None  # it was no session of ours before
    going = tenuto("resume", "back", "-p", "and?", "--max-tokens", "4")
    assert going.code == 0, going.err
    assert "template-diverged" not in going.err
    turns = tenuto("show", "back", "--json").json
    assert [each["role"] for each in turns["messages"]] == ["user", "assistant", "user", "assistant"]


def test_another_model_is_refused_unless_it_is_trusted_and_that_is_told_for_ever(
    tenuto: Tenuto, state: Path, tmp_path: Path
) -> None:
    other = write_tiny(tmp_path / "other.gguf", seed=1)
    refused = tenuto("migrate", str(state), "session:back", "-m", str(other))
    assert refused.code == 38
    assert "does not compute these rows" in refused.err
    assert [each["name"] for each in tenuto("ls", "--json").json["sessions"]] == ["tea"]
    taken = tenuto("migrate", str(state), "session:back", "-m", str(other), "--trust")
    assert taken.code == 0, taken.err
    assert "unverified" in taken.err
    assert "unverified" in tenuto("inspect", "back").out
    assert (
        "nobody verified" in tenuto("resume", "back", "-m", str(other), "-p", "and?", "--max-tokens", "2").err
    )


def test_ids_alone_can_be_read_anew_also_by_another_model(
    tenuto: Tenuto, state: Path, tmp_path: Path
) -> None:
    other = write_tiny(tmp_path / "other.gguf", seed=1)
    taken = tenuto("migrate", str(state), "session:back", "-m", str(other), "--reread")
    assert taken.code == 0, taken.err
    shown = tenuto("inspect", "back").out
    assert "read anew" in shown
    assert "imported" not in shown


def test_a_state_of_memory_needs_its_ids(tenuto: Tenuto, state: Path, tmp_path: Path) -> None:
    gone = tenuto("migrate", "session:tea", "tea.blob", "--to", "llama-blob")
    assert gone.code == 0, gone.err
    refused = tenuto("migrate", "tea.blob", "session:back")
    assert (refused.code, "no token ids" in refused.err) == (2, True)
    ids = tenuto("inspect", "tea", "--json").json["tokens"]
    (tmp_path / "ids").write_text(json.dumps(ids))
    taken = tenuto("migrate", "tea.blob", "session:back", "--tokens", "ids")
    assert taken.code == 0, taken.err
    assert tenuto("inspect", "back", "--json").json["tokens"] == ids

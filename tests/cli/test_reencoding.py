"""`tenuto migrate` makes a session anew, and what that cost is told by whoever looks at it, or goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Tenuto
from tests.tiny import write_tiny

SHORT = ("--max-tokens", "8")
QUANTIZED = ("--type-k", "q8_0", "--type-v", "q8_0")
PLAIN = ("--type-k", "bf16", "--type-v", "bf16")


@pytest.fixture
def session(tenuto: Tenuto) -> str:
    done = tenuto("chat", *SHORT, stdin="why is a raven like a writing desk? " * 10 + "\nand then?\n")
    assert done.code == 0, done.err
    return str(tenuto("ls", "--json").json["sessions"][0]["id"])


def test_a_converted_session_goes_on_and_tells_its_loss(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    there = f"{tmp_path / 'there'}/"
    planned = tenuto("migrate", f"session:{session}", there, *QUANTIZED, "--dry-run")
    assert "bf16 to q8_0, with a loss that is measured and stated" in planned.out
    assert not (tmp_path / "there").exists()
    assert tenuto("migrate", "store:", there, *QUANTIZED).code == 0
    told = tenuto("inspect", session, "--store", there)
    (line,) = (line for line in told.out.splitlines() if line.startswith("re-encoded "))
    assert "bf16 to q8_0 at " in line
    assert "worst row 0." in line
    (loss,) = tenuto("inspect", session, "--store", there, "--json").json["reencoded"]
    assert {part["after"] for part in loss["parts"]} == {"q8_0"}
    done = tenuto("chat", "-c", "--store", there, *QUANTIZED, *SHORT, stdin="more\n")
    assert done.code == 0, done.err
    assert "(recomputed 0): its rows were re-encoded, bf16 to q8_0" in done.err
    assert "re-encoded" not in tenuto("inspect", session).out
    assert tenuto("chat", "-c", "--store", there, *PLAIN, *SHORT).code == 35, "another dtype, another meaning"
    assert tenuto("chat", "-c", "--store", there, *SHORT).code == 0, "that of the session is taken"


def test_what_was_moved_before_is_not_converted_and_that_is_told(
    tenuto: Tenuto, session: str, tmp_path: Path
) -> None:
    there = f"{tmp_path / 'there'}/"
    assert "not converted" not in tenuto("migrate", "store:", there).err
    again = tenuto("migrate", "store:", there, *QUANTIZED)
    assert again.code == 0, again.err
    assert "1 were there already" in again.err
    assert "it was not converted" in again.err
    assert "re-encoded" not in tenuto("inspect", session, "--store", there).out


def test_a_plan_tells_what_cannot_be_converted(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    """Another model was named: it does not know how these rows were made."""
    other = str(write_tiny(tmp_path / "other.gguf", seed=7))
    there = f"{tmp_path / 'there'}/"
    planned = tenuto("migrate", "store:", there, *QUANTIZED, "-m", other, "--dry-run").out
    assert "refused: sessions and kept turns, 1; they cannot be made what is wanted" in planned
    assert "the state was made with weights = " in planned
    done = tenuto("migrate", "store:", there, *QUANTIZED, "-m", other)
    assert done.code == 58
    assert tenuto("ls", "--store", there, "--json").json["sessions"] == []


def test_exact_is_called_so(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    there = f"{tmp_path / 'there'}/"
    assert tenuto("migrate", "store:", there, "--type-k", "f32", "--type-v", "f32").code == 0
    told = tenuto("inspect", session, "--store", there).out
    (line,) = (line for line in told.splitlines() if line.startswith("re-encoded "))
    assert line.endswith(": exact")


def test_a_size_of_chunks_stays(tenuto: Tenuto, session: str, tmp_path: Path) -> None:
    there = f"{tmp_path / 'there'}/"
    assert tenuto("migrate", "store:", there, "--chunk-tokens", "64").code == 0
    assert tenuto("chat", "-c", "--store", there, *SHORT, stdin="more\n").code == 0
    found = tenuto("inspect", session, "--store", there, "--json").json
    assert found["chunk_tokens"] == 64
    assert [chunk["start"] for chunk in found["chunks"]] == list(range(0, found["length"], 64))
    assert tenuto("migrate", "store:", f"{tmp_path / 'other'}/", "--chunk-tokens", "100").code == 2

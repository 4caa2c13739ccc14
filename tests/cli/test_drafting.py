"""--draft on the command line: the same words, and the truth about the guesses."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Tenuto
from tests.tiny import write_tiny

GREEDY = ("--temp", "0", "--max-tokens", "24", "--deterministic")


def test_a_run_says_the_same_and_counts_its_guesses(tenuto: Tenuto, tiny: Path) -> None:
    done = tenuto("run", "--json", *GREEDY, "abcabcabc")
    assert done.code == 0, done.err
    plain = done.json
    assert plain["drafting"] is None
    for draft in ("ngram", str(tiny)):
        drafted = tenuto("run", "--json", *GREEDY, "--draft", draft, "abcabcabc").json
        assert (drafted["text"], drafted["tokens"]) == (plain["text"], plain["tokens"])
        told = drafted["drafting"]
        assert 0 < told["steps"] <= told["drafted"]
        assert told["accepted"] <= told["drafted"] <= told["steps"] * (8 if draft == "ngram" else 4)
        if draft != "ngram":
            assert told["accepted"] == told["drafted"]


def test_a_chat_tells_how_its_drafter_fares(tenuto: Tenuto, tiny: Path) -> None:
    done = tenuto("chat", *GREEDY, "--draft", str(tiny), "--draft-max", "3", stdin="/info\nhello\n/info\n")
    lines = [line for line in done.out.splitlines() if line.startswith("drafting by tiny llama: ")]
    assert lines[0].endswith(": 0 of 0 guesses were right")
    assert "17 of 17 guesses were right, 3.8 tokens a step" in lines[1]
    assert "drafting" not in tenuto("chat", *GREEDY, stdin="hello\n/info\n").out


def test_what_cannot_draft_is_refused_in_one_line(tenuto: Tenuto, tmp_path: Path) -> None:
    stranger = write_tiny(tmp_path / "stranger.gguf", merged="he")
    for arguments, code, words in (
        (("--draft-max", "3"), 2, "--draft-max needs --draft"),
        (("--draft", "mtp"), 2, "no layers that predict further tokens"),
        (("--draft", str(stranger)), 2, "its tokenizer is another"),
        (("--draft", "no-such-model"), 11, "no-such-model"),
        (("--draft", str(tmp_path / "missing.gguf")), 11, "missing.gguf"),
        (("--draft", "ngram", "--draft-max", "0"), 2, "--draft-max"),
    ):
        done = tenuto("run", *arguments, "hello")
        assert done.code == code, done.err
        assert words in done.err
        assert done.out == ""
        assert len(done.err.strip().splitlines()) == 1 or "Usage" in done.err

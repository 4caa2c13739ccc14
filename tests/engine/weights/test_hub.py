"""`hf:` names: what they mean, and what is said where the hub, its client or the model is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from engine.errors import DownloadFailed, ModelNotFound
from engine.weights.hub import HubName
from engine.weights.source import open_weights
from tests.engine.weights.folders import write_folder
from tests.tiny import write_tiny


@pytest.mark.parametrize(
    ("text", "repo", "file"),
    [
        ("hf:a/b", "a/b", None),
        ("hf:a/b/c.gguf", "a/b", "c.gguf"),
        ("hf:a/b/sub/c.gguf", "a/b", "sub/c.gguf"),
    ],
)
def test_a_name_is_a_repository_and_perhaps_a_file(text: str, repo: str, file: str | None) -> None:
    assert HubName.parsed(text) == HubName(repo, file)


@pytest.mark.parametrize("text", ["hf:", "hf:a", "hf:a/", "hf:/b", "hf:a/b/c.bin"])
def test_another_name_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ModelNotFound, match="hf:OWNER/REPO"):
        open_weights(text)


def test_a_file_and_a_folder_of_the_hub_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", layers=1)
    folder = tmp_path / "3f2a"
    write_folder(folder, "qwen3")
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a: (asked.append(a), str(file))[1])
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, allow_patterns: (asked.append(a), str(folder))[1]
    )
    assert open_weights("hf:me/tiny/tiny.gguf").architecture == "llama"
    weights = open_weights("hf:me/tiny")
    assert (weights.architecture, weights.name) == ("qwen3", "tiny")
    assert asked == [("me/tiny", "tiny.gguf"), ("me/tiny",)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.LocalEntryNotFoundError("offline\nlong story"), DownloadFailed),
        (errors.EntryNotFoundError("no such file\nlong story"), ModelNotFound),
        (errors.HFValidationError("bad name\nlong story"), ModelNotFound),
        (OSError("no route\nlong story"), DownloadFailed),
        (RuntimeError(), DownloadFailed),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_what_the_client_raises_becomes_one_of_our_lines(
    error: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(expected) as failed:
        open_weights("hf:me/tiny/tiny.gguf")
    assert "\n" not in str(failed.value)


def test_without_the_client_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match="huggingface_hub"):
        open_weights("hf:me/tiny")


def test_a_place_without_a_model_is_said_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"gone.*gemma3-270m, smollm2"):
        open_weights(tmp_path / "gone")

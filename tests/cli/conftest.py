"""A tiny model in a file, a store in a folder, and the command line as a function."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.main import execute
from tests.tiny import write_tiny


@dataclass(frozen=True, slots=True)
class Done:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Tenuto = Callable[..., Done]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def tenuto(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Tenuto:
    """Runs one command line in this process, with its stdin."""
    monkeypatch.setenv("TENUTO_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TENUTO_MODEL", str(tiny))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = execute(arguments)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run

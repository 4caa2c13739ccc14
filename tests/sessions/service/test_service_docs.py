"""What docs/service.md shows works as it stands, and its tables are whole."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sessions.service.app import build_app
from sessions.service.refusals import STATUS, code_of
from tests.sessions.service.fake import FakeBackend
from tests.sessions.service.serving import Served

PAGE = (Path(__file__).parents[3] / "docs" / "service.md").read_text("utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on the PATH")
def test_the_examples_run(at: Served, tmp_path: Path) -> None:
    shown = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) >= 3
    script = "set -eu\n" + "\n".join(shown).replace("localhost:8080", at.url.removeprefix("http://"))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr)
    assert "event: begun" in done.stdout
    assert "event: ended" in done.stdout
    assert (tmp_path / "tea.tenuto").stat().st_size > 0


def test_every_status_of_an_error_is_told_with_its_code() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", PAGE, re.MULTILINE)
    told = {status: " ".join(codes for number, codes in rows if number == status) for status, _ in rows}
    for error, status in STATUS.items():
        assert str(status) in told
        if status not in (400, 500) and not error.__subclasses__():
            assert f"`{code_of(error(''))}`" in told[str(status)], error


def test_every_route_of_sessions_is_told() -> None:
    paths = build_app(FakeBackend()).openapi()["paths"]
    for path, methods in paths.items():
        if path.startswith(
            ("/v1/sessions", "/v1/storage", "/slots", "/health", "/metrics", "/props", "/tokenize")
        ):
            for method in methods:
                assert f"{method.upper()} {path.replace('session}', 's}').replace('{slot}', '{id}')}" in PAGE

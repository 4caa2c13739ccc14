"""What the documents say is what the program does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cli import docs
from cli.main import INTERRUPTED
from engine import errors
from tools import modules

ROOT = Path(__file__).parent.parent

#: Folders of one machine, and hosts that packages come from: nobody else can follow such a line.
_PRIVATE = re.compile(
    r"""(?<![\w.~/-])/(?:work|root|home/\w+|Users/\w+|opt/\w+)/"""
    r"""|\bpypi\.[a-z]|\bpythonhosted\b|\b(?:extra-)?index-url\b"""
)


def test_the_command_line_reference_is_not_stale() -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert page == docs.render(), "run `make docs`"


def test_the_list_of_modules_is_not_stale() -> None:
    assert modules.PAGE.read_text("utf-8") == modules.render(), "run `make docs`"


def error_classes() -> dict[str, int]:
    found = vars(errors).values()
    return {
        each.__name__: each.exit_code
        for each in found
        if isinstance(each, type) and issubclass(each, errors.TenutoError)
    }


def test_the_readme_lists_every_exit_code() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| `?(\w*)`? *\|", readme, re.MULTILINE)
    listed = {name: int(code) for code, name in rows if name in error_classes()}
    assert listed == error_classes()
    assert str(INTERRUPTED) in {code for code, _ in rows}


def test_the_error_tree_is_drawn_as_it_is() -> None:
    assert errors.__doc__ is not None
    drawn = {
        name: int(code) for name, code in re.findall(r"(\w+) +(\d+)(?:   |$)", errors.__doc__, re.MULTILINE)
    }
    assert drawn == error_classes()


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_line_names_a_place_that_only_one_machine_has() -> None:
    for path in tracked():
        if path == Path(__file__).resolve() or path.suffix not in {".py", ".md", ".toml", ".txt", ""}:
            continue
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            assert not _PRIVATE.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"


def test_links_between_documents_lead_somewhere() -> None:
    for path in tracked():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"

"""The names that this project takes are its own, and only what is meant to is shipped."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "serialization", "sessions", "cli")


@pytest.mark.parametrize("name", PACKAGES)
def test_each_name_imports_from_this_checkout(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"


@pytest.mark.parametrize("name", PACKAGES)
def test_each_name_belongs_to_one_distribution(name: str) -> None:
    assert set(packages_distributions().get(name, ["tenuto"])) == {"tenuto"}


def test_the_wheel_holds_the_four_floors_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    shipped = {name for name in names if name.endswith(".py")}
    assert shipped == {str(p.relative_to(ROOT)) for top in PACKAGES for p in (ROOT / top).rglob("*.py")}
    assert {name for name in names if name.endswith("py.typed")} == {f"{top}/py.typed" for top in PACKAGES}
    page = {name for name in names if name.startswith("sessions/service/page/")}
    assert page == {str(p.relative_to(ROOT)) for p in (ROOT / "sessions/service/page").iterdir()}


def test_every_folder_with_code_is_a_package() -> None:
    for top in (*PACKAGES, "tests", "benchmarks", "tools"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_what_is_pinned_is_what_is_asked_for() -> None:
    pins = {
        line.split("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in project["dependencies"]:
        assert requirement.split(">=")[0].lower() in pins, f"{requirement} is not pinned"


@pytest.mark.parametrize("floor", ["engine", "serialization", "sessions"])
def test_environment_variables_are_read_in_cli_alone(floor: str) -> None:
    # gloo takes its interface from a variable and from nothing else: it is set there, and no setting read.
    spared = {ROOT / "engine" / "parallel" / "group.py"}
    for path in {*(ROOT / floor).rglob("*.py")} - spared:
        # Handing the whole environment on to a child process reads none of it.
        text = path.read_text("utf-8").replace("{**os.environ,", "")
        assert not re.search(r"os\.environ|getenv", text), path

"""Whatever a configuration says, it is loaded, or refused in one line by the name of what makes no sense.
Nothing else is raised, and nothing is allocated for a size that no tensor has."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, ModelError
from tests.exact.members import MEMBERS, OTHERS, folder
from tests.oracles import base

ALL = [*MEMBERS, *OTHERS]
#: put in place of a field's value; ... takes the field away
WRONG: tuple[Any, ...] = (..., None, 0, -1, 7, 2**40, 1.5, "x", True, [], ["x"], [1, 2], {}, {"x": 1})
GATE = 40


def changes(family: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every (path of a field, wrong value) of a family's configuration, in an order that looks random."""
    tree = json.loads((folder(family) / "config.json").read_text())
    every = [(path, wrong) for path in paths(tree) for wrong in WRONG if wrong != value_at(tree, path)]
    random.Random(family).shuffle(every)
    return iter(every)


def paths(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def value_at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed(tree: dict[str, Any], path: tuple[str, ...], wrong: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    inner = value_at(copy, path[:-1])
    if wrong is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = wrong
    return copy


def misbehaviours(family: str, place: Path, limit: int | None) -> list[str]:
    """What a load raised that it should not have."""
    source = folder(family)
    tree = json.loads((source / "config.json").read_text())
    for file in source.iterdir():
        shutil.copy(file, place / file.name)
    found = []
    for count, (path, wrong) in enumerate(changes(family)):
        if count == limit:
            break
        (place / "config.json").write_text(json.dumps(changed(tree, path, wrong)))
        try:
            base.open_engine(place, num_cells=64, n_ctx=64)
        except (ModelError, ConfigError) as error:
            if "\n" in str(error):
                found.append(f"{'.'.join(path)} = {wrong}: more than one line")
        except Exception as error:
            found.append(f"{'.'.join(path)} = {wrong}: {type(error).__name__}: {str(error)[:90]}")
    return found


@pytest.mark.parametrize("family", ALL)
def test_a_field_that_makes_no_sense_is_refused(family: str, tmp_path: Path) -> None:
    assert misbehaviours(family, tmp_path, GATE) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ALL)
def test_every_field_and_every_wrong_value(family: str, tmp_path: Path) -> None:
    assert misbehaviours(family, tmp_path, None) == []

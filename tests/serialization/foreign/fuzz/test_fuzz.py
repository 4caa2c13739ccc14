"""Every reader withstands wrong files: a few in the gate, ten minutes of them by `make fuzz`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch

from engine.errors import Corrupt
from serialization.foreign.geometry import Geometry
from tests.serialization.foreign.fuzz import running
from tests.serialization.foreign.fuzz.running import Figures, Finding, run
from tests.serialization.foreign.fuzz.targets import TARGETS, Seed, Target
from tests.serialization.foreign.geometries import GEOMETRIES

INPUTS = 400


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_law(name: str) -> None:
    figures = run(TARGETS[name], random.Random(0), lambda figures: figures.inputs < INPUTS)
    assert figures.inputs == INPUTS
    assert figures.outcomes["read"] >= len(TARGETS[name].seeds), "seeds are read, and perhaps others"
    assert figures.corpus >= 20, "inputs must come to many different ends"


def fake(read: Callable[[bytearray, Geometry], object]) -> Target:
    """Of one seed that does nothing, and then inputs to `read`."""
    good = b"x" * 64
    seed = Seed("seed", good, GEOMETRIES["plain"])
    return Target("fake", (seed,), lambda data, geometry: None if data == good else read(data, geometry))


def once(figures: Figures) -> bool:
    return figures.inputs < 20


def test_another_error_is_a_finding() -> None:
    def read(data: bytearray, geometry: Geometry) -> None:
        raise KeyError("a")

    with pytest.raises(Finding, match="KeyError"):
        run(fake(read), random.Random(0), once)


def test_what_never_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytearray, geometry: Geometry) -> None:
        try:
            while True:
                time.sleep(0.001)
        except Exception:
            raise Corrupt("hidden") from None

    monkeypatch.setattr(running, "MAX_SECONDS", 0.05)
    with pytest.raises(Finding, match="takes longer than"):
        run(fake(read), random.Random(0), once)


@pytest.mark.parametrize("torch_takes_it", [True, False])
def test_much_memory_is_a_finding(torch_takes_it: bool) -> None:
    def read(data: bytearray, geometry: Geometry) -> None:
        taken = torch.zeros(3 * 2**20, dtype=torch.uint8) if torch_takes_it else bytes(3 * 2**20)
        assert len(taken)
        raise Corrupt("and refused")

    with pytest.raises(Finding, match="bytes beyond four times its size"):
        run(fake(read), random.Random(0), once)


def test_the_same_seed_makes_the_same_inputs() -> None:
    def ends(seed: int) -> list[tuple[str, int]]:
        target = TARGETS["transformers"]
        return sorted(run(target, random.Random(seed), lambda figures: figures.inputs < 200).outcomes.items())

    assert ends(5) == ends(5)
    assert ends(5) != ends(6)

"""One input after the other against the laws: a StateError or a result, soon, and in little memory."""

from __future__ import annotations

import random
import re
import signal
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import StateError
from serialization.foreign.geometry import Geometry
from tests.serialization.foreign.fuzz.mutations import mutated
from tests.serialization.foreign.fuzz.targets import Seed, Target

#: Of one input; the slowest of the good files takes a hundredth of it.
MAX_SECONDS = 5.0

#: What a reader may allocate beside the file's own bytes: so many times as many, and so many more.
MAX_RATIO = 4
MAX_CONSTANT = 2**21

#: Inputs that were new in what became of them are mutated further, so many at most.
_MAX_CORPUS = 2000


class Finding(AssertionError):
    """An input that breaks a law."""

    def __init__(self, what: str, target: str, data: bytes, seed: str) -> None:
        super().__init__(f"{target}: {what} ({len(data)} bytes, from {seed})")
        self.data = data


@dataclass(slots=True)
class Figures:
    """What a run saw."""

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    corpus: int = 0
    slowest: float = 0.0
    most_beyond: int = 0  # bytes beside the file, beyond four times its size

    def as_json(self) -> dict[str, object]:
        return {
            "inputs": self.inputs,
            "read": self.outcomes["read"],
            "refused": {name: count for name, count in self.outcomes.most_common() if name != "read"},
            "ways": self.corpus,
            "slowest_ms": round(1000 * self.slowest, 1),
            "most_beyond_four_times": max(0, self.most_beyond),
        }


class _Allocated(TorchDispatchMode):
    """Counts what torch allocates, which no Python tool sees: all of it, freed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.nbytes += each.untyped_storage().nbytes()
        return out


class _TooSlow(BaseException):
    """Is caught by nothing that a reader does."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(target: Target, draw: random.Random, more: Callable[[Figures], bool]) -> Figures:
    """Inputs to `target` while `more` says so: its seeds, and then mutations of them and of what was found.
    Raises Finding at the first that breaks a law."""
    figures = Figures()
    seen: set[str] = set()
    corpus: list[tuple[bytes, Seed]] = []
    parts = [seed.data for seed in target.seeds]
    geometries = list({seed.geometry: None for seed in target.seeds})
    with _Allocated():  # what is imported for the first input is nothing of its own
        target.read(bytearray(target.seeds[0].data), target.seeds[0].geometry)
    tracemalloc.start()
    try:
        for seed in target.seeds:
            corpus.append((seed.data, seed))
            seen.add(_way(target, seed.data, seed, seed.geometry, figures))
        while more(figures):
            # Half of the times a good file: most of what was found is broken already.
            data, seed = draw.choice(corpus if draw.random() < 0.5 else corpus[: len(target.seeds)])
            data = mutated(draw, data, parts)
            geometry = seed.geometry if draw.random() < 0.9 else draw.choice(geometries)
            way = _way(target, data, seed, geometry, figures)
            if way not in seen and len(corpus) < _MAX_CORPUS:
                seen.add(way)
                corpus.append((data, seed))
    finally:
        tracemalloc.stop()
    figures.corpus = len(seen)
    return figures


def _way(target: Target, data: bytes, seed: Seed, geometry: Geometry, figures: Figures) -> str:
    """What became of an input, without its numbers. Raises Finding."""
    given = bytearray(data)
    figures.inputs += 1
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    began = time.perf_counter()
    with _Allocated() as allocated:
        try:
            with _limited(MAX_SECONDS), warnings.catch_warnings():
                warnings.simplefilter("error")
                found = target.read(given, geometry)
            way, outcome = f"read {type(found).__name__}", "read"
        except StateError as error:
            outcome = type(error).__name__
            way = f"{outcome} {re.sub(r'[0-9]+', '0', str(error))[:120]}"
            found = None
        except _TooSlow:
            raise Finding(f"takes longer than {MAX_SECONDS} s", target.name, data, seed.name) from None
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise Finding(what, target.name, data, seed.name) from error
    figures.slowest = max(figures.slowest, time.perf_counter() - began)
    beyond = tracemalloc.get_traced_memory()[1] - before + allocated.nbytes - MAX_RATIO * len(data)
    figures.most_beyond = max(figures.most_beyond, beyond)
    if beyond > MAX_CONSTANT:
        raise Finding(f"takes {beyond:,} bytes beyond four times its size", target.name, data, seed.name)
    figures.outcomes[outcome] += 1
    return way

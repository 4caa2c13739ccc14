"""Tiny engines for the laws of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from tests.tiny import write_tiny

MakeEngine = Callable[..., Engine]

#: tokens a window holds in the windowed model
WINDOW = 32


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers, six of them with a window."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny(folder / "windowed.gguf", "gemma3", layers=7, window=WINDOW)


@pytest.fixture
def make_engine(tiny_path: Path) -> MakeEngine:
    def make(path: Path = tiny_path, **settings: object) -> Engine:
        config = {"n_ctx": 512, "num_cells": 2048, "num_seqs": 4, "threads": 1, "dtype": "f32", **settings}
        return load_engine(path, EngineConfig.from_mapping(config))

    return make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()

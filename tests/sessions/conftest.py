"""Tiny engines and fresh stores for the laws of sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.stores.disk import DiskStore
from tests.sessions.clock import Clock
from tests.tiny import write_tiny

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers, six of them with a window of 32."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "windowed.gguf", "gemma3", layers=7)


@pytest.fixture
def make_engine(tiny_path: Path) -> MakeEngine:
    def make(path: Path = tiny_path, **settings: object) -> Engine:
        config = {"n_ctx": 2048, "num_cells": 8192, "num_seqs": 8, "threads": 1, "dtype": "f32", **settings}
        return load_engine(path, EngineConfig.from_mapping(config))

    return make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "store", "default")


@pytest.fixture
def manager(store: DiskStore, engine: Engine) -> SessionManager:
    return SessionManager(store, engine, Policy(lease=5, grace=10))

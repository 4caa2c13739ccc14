"""A real backend: a tiny model over a store on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sessions.policy import Policy
from sessions.service.backend import Backend, BackendConfig
from sessions.stores.disk import DiskStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.serving import Served, served

MakeBackend = Callable[..., Backend]


@pytest.fixture
def make_backend(make_engine: MakeEngine, tmp_path: Path) -> Iterator[MakeBackend]:
    """Backends over one store; each is closed at the end."""
    made: list[Backend] = []

    def make(config: BackendConfig | None = None, **settings: object) -> Backend:
        engine = make_engine(**settings)
        config = config or BackendConfig(policy=Policy(lease=5, grace=10))
        made.append(Backend(engine, lambda tenant: DiskStore(tmp_path / "store", tenant), config))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def at(make_backend: MakeBackend) -> Iterator[Served]:
    with served(make_backend()) as running:
        yield running

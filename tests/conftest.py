"""What every test starts from: no home, no settings, one thread; and the real models, fetched once."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
import torch
from hypothesis import settings

from tests.redis_server import RedisServer

# Computed before any test's home is taken away: weights are fetched once for a person, not per test.
MODELS = platformdirs.user_cache_path("tenuto") / "models"

settings.register_profile("gate", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("nightly", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder and none of the person's settings."""
    home = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith(("TENUTO_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TENUTO_MODELS", str(MODELS))
    return home


@pytest.fixture(autouse=True, scope="module")
def given_back() -> Iterator[None]:
    """After each module its memory goes back to the machine: the allocator would keep gigabytes of it, and
    whoever forks would copy what leads to them."""
    yield
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return fetched("gemma3-270m")


def fetched(name: str) -> Path:
    from engine.weights.fetch import fetch

    return fetch(name, MODELS)


@pytest.fixture(scope="session")
def one_redis_server() -> Iterator[RedisServer]:
    """A real server on a socket of its own, for the whole run of one worker."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server(one_redis_server: RedisServer) -> RedisServer:
    """The same, empty: what a test leaves there, settings of a store too, meets no other."""
    with one_redis_server.client() as client:
        client.flushall()
    return one_redis_server

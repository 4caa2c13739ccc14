"""Hosted engines with one kind of part, or with several."""

from __future__ import annotations

import pytest

from engine.runner import Engine
from tests.engine.hosted.models import hosted, tiny


@pytest.fixture(scope="module")
def llama() -> Engine:
    return hosted(tiny("llama"))


@pytest.fixture(scope="module")
def gemma() -> Engine:
    return hosted(tiny("gemma3"))


@pytest.fixture(scope="module")
def bamba() -> Engine:
    return hosted(tiny("bamba"))

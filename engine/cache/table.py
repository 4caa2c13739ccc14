"""The kinds of memory: what a model names, and what builds it. Branching on the kind ends here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.cache.iswa import build_iswa
from engine.cache.kv import build_kv
from engine.cache.memory import Memory, MemorySpec
from engine.errors import ConfigError

KINDS: Mapping[str, Callable[[MemorySpec], Memory]] = {"kv": build_kv, "iswa": build_iswa}


def build_memory(kind: str, spec: MemorySpec) -> Memory:
    """An empty memory of `kind`. Raises ConfigError for a kind, or a row type, that there is not."""
    if kind not in KINDS:
        raise ConfigError(f"memory kind {kind!r}: there are {', '.join(KINDS)}")
    return KINDS[kind](spec)

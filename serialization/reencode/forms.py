"""What a memory with rows of other dtypes is like: the engine's to say, and handed in
(docs/adr/0009-reencoding.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from engine.state import Layout, Value


class MemoryForm(Protocol):
    """The memory of a model whose rows are of two dtypes."""

    @property
    def layout(self) -> Layout: ...

    @property
    def meaning(self) -> Mapping[str, Value]:
        """What the fingerprint of such an engine says of its states' meaning, all of it."""
        ...

    @property
    def rotated(self) -> Mapping[str, int]:
        """Of parts that are stored Hadamard-rotated how many values are rotated together, by name."""
        ...


#: The form of the same model's memory for `type_k` and `type_v` (`engine.runner.Engine.form`). Raises
#: ConfigError for a dtype that its rows cannot be stored as.
Forms = Callable[[str, str], MemoryForm]

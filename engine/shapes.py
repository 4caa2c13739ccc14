"""Whether what is computed now has to have one shape, however many rows of it are wanted.

Set around a pass, not handed through the models: nearly all that they compute has as many rows as the pass,
and need not know. Asks who would gather some of the rows, or computes for a part of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_fixed: ContextVar[bool] = ContextVar("fixed", default=False)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Within this, work that depends on how many rows share it is done row by row, or for all of them."""
    token = _fixed.set(True)
    try:
        yield
    finally:
        _fixed.reset(token)


def shapes_are_fixed() -> bool:
    return _fixed.get()

"""1 to 2: the map of a manifest is packed."""

from __future__ import annotations

from serialization.blobs import Bytes
from serialization.canonical import unpack
from serialization.migrate.step import Step
from serialization.records import Values, values_of


def _plain(body: Bytes, what: str) -> Values:
    """Version 1 has the map as it is, to the end."""
    return values_of(unpack(body, what), what)


def _same(values: Values) -> Values:
    """Version 2 says what version 1 said, key by key."""
    return values


PACKED = Step(
    since=1,
    name="packed",
    why="a manifest is written anew by every turn, and outlives its rows; packed, it is half as large",
    spelt=_plain,
    apply=_same,
)

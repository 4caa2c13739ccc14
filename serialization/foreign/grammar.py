"""The version table of llama.cpp states: which bytes each version may mean, as frozen values.

A version number does not identify a layout: four have been written under sequence version 2, and four
under session version 9. A new version is one more row, or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from engine.errors import UnknownVersion
from serialization.foreign.geometry import CellExtension


class Scope(StrEnum):
    """Whose cells a payload has."""

    SEQUENCE = "sequence"
    CONTEXT = "session"  # all sequences of a context, as session files have them


class Owners(StrEnum):
    """What cells of a KV cache say about the sequences that own them."""

    NONE = "none"  # a count of zero
    ONE = "one"  # a count of one, and an id
    ANY = "any"  # a count, and as many ids


@dataclass(frozen=True, slots=True)
class Grammar:
    """One layout.

    `name` is ours; `version` the number that files of it are stamped with. `streams`: KV caches begin with
    a number of streams. `extension`: words of 4 bytes that each cell has behind its count of owners, by
    what the model needs. `outputs`: last logits and embeddings stand before the memory. `merged`: full and
    sliding layers may share one cache. `unrotated`: older than the rotation of quantized rows.
    """

    name: str
    scope: Scope
    version: int
    streams: bool
    owners: Owners
    extension: Mapping[CellExtension, int]
    outputs: bool = False
    merged: bool = False
    unrotated: bool = False

    def words(self, extension: CellExtension) -> int:
        return self.extension.get(extension, 0)


NO_WORDS: Mapping[CellExtension, int] = {}
PLACE: Mapping[CellExtension, int] = {CellExtension.POSITION_2D: 2}  # x, y
PLACE_AND_TOKEN: Mapping[CellExtension, int] = {  # x, y, token id
    CellExtension.POSITION_2D: 3,
    CellExtension.TOKEN: 3,
}

_SEQUENCE, _CONTEXT = Scope.SEQUENCE, Scope.CONTEXT
_NONE, _ONE, _ANY = Owners.NONE, Owners.ONE, Owners.ANY

#: Every layout whose bytes are known. Among those of one version the older come first.
GRAMMARS: tuple[Grammar, ...] = (
    # August 2024 to May 2025
    Grammar("2a", _SEQUENCE, 2, False, _NONE, NO_WORDS, merged=True, unrotated=True),
    # May to July 2025
    Grammar("2b", _SEQUENCE, 2, False, _ONE, NO_WORDS, merged=True, unrotated=True),
    # July 2025 to March 2026
    Grammar("2c", _SEQUENCE, 2, True, _ONE, NO_WORDS),
    # March to August 2026
    Grammar("2d", _SEQUENCE, 2, True, _ONE, PLACE),
    # since 26 August 2026
    Grammar("3", _SEQUENCE, 3, True, _ONE, PLACE_AND_TOKEN),
    # September 2024 to July 2025
    Grammar("9a", _CONTEXT, 9, False, _ANY, NO_WORDS, outputs=True, merged=True, unrotated=True),
    # July 2025 to February 2026
    Grammar("9b", _CONTEXT, 9, True, _ANY, NO_WORDS, outputs=True, unrotated=True),
    # February and March 2026
    Grammar("9c", _CONTEXT, 9, True, _ANY, NO_WORDS),
    # March to August 2026
    Grammar("9d", _CONTEXT, 9, True, _ANY, PLACE),
    # since 26 August 2026
    Grammar("10", _CONTEXT, 10, True, _ANY, PLACE_AND_TOKEN),
)
BY_NAME: Mapping[str, Grammar] = {each.name: each for each in GRAMMARS}

#: Versions that are written somewhere, and whose bytes are not known here.
UNREAD: Mapping[tuple[Scope, int], str] = {
    (_SEQUENCE, 4): "llama.cpp 0.6.0",
    (_CONTEXT, 11): "llama.cpp 0.6.0",
}


def grammars_of(scope: Scope, version: int) -> tuple[Grammar, ...]:
    """The layouts that a file of this version can have. Raises `UnknownVersion` where none is known."""
    found = tuple(each for each in GRAMMARS if each.scope is scope and each.version == version)
    if found:
        return found
    by = UNREAD.get((scope, version))
    writer = f" (written by {by})" if by else ""
    known = ", ".join(sorted({str(each.version) for each in GRAMMARS if each.scope is scope}, key=int))
    raise UnknownVersion(
        f"llama.cpp {scope} version {version}{writer} is not read; known are {known}",
        version=version,
        scope=str(scope),
    )

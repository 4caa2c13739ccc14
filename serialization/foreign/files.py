"""What llama.cpp wraps a memory in: files of a sequence or a context, slot files, and states in memory.

    sequence file    "GGSQ", u32 version, tokens, payload             also llama-server's slot files
    session file     "GGSN", u32 version, tokens, name, [outputs], payload
    sequence state   u32 0xaf143cd8, i32 sequence, payload            since May 2026
    bare state       payload                                          before
    context state    name, [outputs], payload

A name is a u32 length and the architecture's name. Who wrote which bytes is in `grammar.GRAMMARS`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from engine.errors import FingerprintMismatch, UnknownFeature, UnknownFormat
from serialization.foreign.cursor import Bytes, Cursor
from serialization.foreign.geometry import Geometry
from serialization.foreign.grammar import GRAMMARS, Grammar, Scope, grammars_of
from serialization.foreign.payload import Part, read_payload, write_payload
from serialization.foreign.records import (
    Outputs,
    TokenRecord,
    read_outputs,
    read_tokens,
    write_outputs,
    write_tokens,
)

#: an architecture's name is at most so long
MAX_NAME = 64


class Container(StrEnum):
    """The values are what people call them."""

    SEQUENCE_FILE = "sequence file"
    SESSION_FILE = "session file"
    SEQUENCE_STATE = "sequence state from memory"
    BARE_STATE = "sequence state from memory, without a prefix"
    CONTEXT_STATE = "context state from memory"

    @property
    def scope(self) -> Scope:
        if self in (Container.SESSION_FILE, Container.CONTEXT_STATE):
            return Scope.CONTEXT
        return Scope.SEQUENCE

    @property
    def stamped(self) -> bool:
        """Whether it begins with a magic, a version and tokens."""
        return self in (Container.SEQUENCE_FILE, Container.SESSION_FILE)


MAGICS = {
    b"qsgg": Container.SEQUENCE_FILE,
    b"nsgg": Container.SESSION_FILE,
    struct.pack("<I", 0xAF143CD8): Container.SEQUENCE_STATE,
}
MAGIC_OF = {container: magic for magic, container in MAGICS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What stands before the payload: the grammars that what follows `at` may have. `sequence` is what the
    prefix of a sequence state says."""

    container: Container
    at: int
    grammars: tuple[Grammar, ...]
    record: TokenRecord | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LlamaFile:
    """All that is in one file, as `grammar` understands it. `merged`: read by `Geometry.merged`."""

    container: Container
    grammar: Grammar
    merged: bool
    record: TokenRecord | None
    sequence: int | None
    outputs: Outputs | None
    parts: tuple[Part, ...]


def read_head(data: memoryview, geometry: Geometry) -> Head:
    """Of what begins with a magic. Raises `UnknownFormat` for what does not, `UnknownVersion` for a version
    whose bytes are not known, `Corrupt`."""
    cursor = Cursor(data)
    magic = bytes(cursor.take(min(4, len(data)), "a magic"))
    if magic[::-1] in MAGICS:
        raise UnknownFeature("a llama.cpp state of a big-endian machine")
    if magic not in MAGICS:
        raise UnknownFormat("not a llama.cpp state: it begins with none of their magics")
    container = MAGICS[magic]
    if container.stamped:
        grammars = grammars_of(container.scope, cursor.u32("the version"))
        record = read_tokens(cursor, geometry.vocab_size)
        return Head(container, cursor.at, grammars, record)
    sequence = cursor.i32("a sequence id")
    return Head(container, cursor.at, _grammars(container), sequence=sequence)


def bare_heads() -> tuple[Head, ...]:
    """How bytes without a magic may be understood."""
    return tuple(
        Head(container, 0, _grammars(container))
        for container in (Container.BARE_STATE, Container.CONTEXT_STATE)
    )


def read_body(data: memoryview, head: Head, geometry: Geometry, grammar: Grammar, merged: bool) -> LlamaFile:
    """What follows a head, understood by one grammar and consumed to the last byte. Raises `Corrupt`, and
    `FingerprintMismatch` where a context's architecture is another than the model's."""
    cursor = Cursor(data, head.at)
    outputs = None
    if head.container.scope is Scope.CONTEXT:
        _read_name(cursor, geometry)
        outputs = read_outputs(cursor, geometry.vocab_size) if grammar.outputs else None
    parts = read_payload(cursor, geometry.merged() if merged else geometry, grammar)
    return LlamaFile(head.container, grammar, merged, head.record, head.sequence, outputs, parts)


def write_file(file: LlamaFile, geometry: Geometry) -> Iterator[Bytes]:
    """The bytes that it was read from, in pieces."""
    if file.container in MAGIC_OF:
        yield MAGIC_OF[file.container]
    if file.record is not None:
        yield struct.pack("<I", file.grammar.version)
        yield from write_tokens(file.record)
    if file.sequence is not None:
        yield struct.pack("<i", file.sequence)
    if file.container.scope is Scope.CONTEXT:
        name = geometry.architecture.encode()
        yield struct.pack("<I", len(name))
        yield name
    if file.outputs is not None:
        yield from write_outputs(file.outputs)
    yield from write_payload(file.parts, geometry.merged() if file.merged else geometry, file.grammar)


def _grammars(container: Container) -> tuple[Grammar, ...]:
    """A state from memory has no version: those of its scope. The prefix is younger than layout 2c."""
    found = tuple(each for each in GRAMMARS if each.scope is container.scope)
    if container is Container.SEQUENCE_STATE:
        return tuple(each for each in found if each.name in ("2d", "3"))
    if container is Container.BARE_STATE:
        return tuple(each for each in found if each.name != "3")
    return found


def _read_name(cursor: Cursor, geometry: Geometry) -> None:
    at = cursor.at
    length = cursor.count("letters of an architecture", 1, MAX_NAME)
    name = bytes(cursor.take(length, "the name of an architecture"))
    if not length or not all(33 <= letter < 127 for letter in name):
        raise cursor.corrupt("no name of an architecture", at)
    if name.decode() != geometry.architecture:
        raise FingerprintMismatch(
            f"the state is of a {name.decode()} model, and the model is {geometry.architecture}",
            field="architecture",
        )

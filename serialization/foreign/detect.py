"""Which layout the bytes of a llama.cpp state have: every one that may be is tried.

One fits if it consumes the file exactly under the model's geometry, with types, row sizes and positions that
can be. Several that fit and say the same are one; several that say different things are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.errors import AmbiguousFormat, StateError, UnknownFeature, UnknownFormat
from serialization.foreign.cursor import Bytes, writable
from serialization.foreign.files import MAGICS, Head, LlamaFile, bare_heads, read_body, read_head
from serialization.foreign.foreign_state import ForeignCells, ForeignRows, ForeignState
from serialization.foreign.geometry import Geometry
from serialization.foreign.grammar import Grammar
from serialization.foreign.sequences import sequence_of, sequences_in


def sniff(first: bytes) -> bool:
    """Whether a file that begins so is a llama.cpp state: by its first four bytes. States from memory that
    have no prefix cannot be told from anything; `read_llama` reads them where it is asked to."""
    return first[:4] in MAGICS or first[:4][::-1] in MAGICS


def read_llama(buffer: Bytes, geometry: Geometry, sequence: int | None = None) -> ForeignState:
    """One sequence of a llama.cpp state of any container and layout, the only one where none is named.

    Rows are views of the buffer (of a copy of it, if it is read-only), which must not change while they are
    used. Raises `UnknownVersion`, `UnknownFeature`, `LimitExceeded` and `FingerprintMismatch` where the file
    says so itself; `Corrupt` where no layout of its version fits (`UnknownFormat`, where it has none),
    saying what each failed at; `AmbiguousFormat` where several do that mean different things, or where it
    holds several sequences and none is named; `UsageError` for a sequence that it does not hold.
    """
    states = [sequence_of(file, geometry, sequence) for file in read_files(buffer, geometry)]
    first, *others = states
    for other in others:
        if not _same(first, other):
            raise AmbiguousFormat(
                f"it can be read as layout {first.layout} and as {other.layout}, which mean different things",
                layouts=(first.layout, other.layout),
            )
    return first


def sequences(buffer: Bytes, geometry: Geometry) -> tuple[int, ...]:
    """The ids of the sequences that a state holds, rising. Raises what `read_llama` raises."""
    return sequences_in(read_files(buffer, geometry)[0])


def read_files(buffer: Bytes, geometry: Geometry) -> list[LlamaFile]:
    """What the bytes may mean, once for every layout that fits: one at least. Raises as `read_llama`."""
    data = writable(buffer)
    heads = (read_head(data, geometry),) if sniff(bytes(data[:4])) else bare_heads()
    files: list[LlamaFile] = []
    failures: list[tuple[str, StateError]] = []
    for head in heads:
        for grammar, merged in _ways(head, geometry):
            try:
                files.append(read_body(data, head, geometry, grammar, merged))
            except StateError as error:
                name = f"{grammar.name}, one cache" if merged else grammar.name
                failures.append((name, error))
    if not files:
        raise _refusal(failures, len(heads) == 1)
    return files


def _ways(head: Head, geometry: Geometry) -> Iterator[tuple[Grammar, bool]]:
    """Every grammar, once for each way that caches may have been divided. Of those that say the same bytes
    of this model, the oldest."""
    seen = set()
    for grammar in head.grammars:
        for merged in (True, False) if grammar.merged and geometry.merged() is not geometry else (False,):
            rules = (
                grammar.streams,
                grammar.owners,
                grammar.words(geometry.extension),
                grammar.outputs,
                merged,
            )
            if rules not in seen:
                seen.add(rules)
                yield grammar, merged


def _refusal(failures: list[tuple[str, StateError]], stamped: bool) -> StateError:
    """What all failed at; else the one that is no doubt about the layout, or all of them in one line."""
    if len({str(error) for _, error in failures}) == 1:
        return failures[0][1]
    for _, error in failures:
        if isinstance(error, UnknownFeature):
            return error
    said = "; ".join(f"{name}: {error}" for name, error in failures)
    kind = type(failures[0][1]) if stamped else UnknownFormat
    return kind(f"no layout fits ({said})", failures=tuple((name, str(error)) for name, error in failures))


def _same(a: ForeignState, b: ForeignState) -> bool:
    """Whether two readings, by the same geometry, mean the same."""
    if a.tokens != b.tokens or (a.point and a.point.position) != (b.point and b.point.position):
        return False
    return all(map(_same_cells, a.caches, b.caches)) and _same_rows(
        a.point.rows if a.point else (), b.point.rows if b.point else ()
    )


def _same_cells(a: ForeignCells, b: ForeignCells) -> bool:
    return np.array_equal(a.positions, b.positions) and _same_rows(a.rows, b.rows)


def _same_rows(a: tuple[ForeignRows, ...], b: tuple[ForeignRows, ...]) -> bool:
    return all(
        mine.dtype == other.dtype and torch.equal(mine.data, other.data)
        for mine, other in zip(a, b, strict=True)
    )

"""Cells of llama.cpp caches: positions, and which sequences own them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serialization.foreign.cursor import Bytes, Cursor, Words
from serialization.foreign.grammar import Owners

#: llama.cpp's own bound on sequences (LLAMA_MAX_SEQ)
MAX_OWNERS = 256


@dataclass(frozen=True, slots=True)
class CellForm:
    """How cells are written: whether their cache begins with a number of streams, what they say of owners,
    and `words` of extension. `places`: cells of one position may differ in their place in a picture."""

    streams: bool
    owners: Owners
    words: int = 0
    places: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """`positions` int32 [cells]; `counts` int32 [cells] of owners; `owners` int32 [sum of counts], a cell's
    behind those of the one before; `extension` int32 [cells, words] where there are any words."""

    positions: Words
    counts: Words
    owners: Words
    extension: Words | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def owned_by(self, sequence: int) -> npt.NDArray[np.int64]:
        """Indices of the cells that a sequence owns, in their order."""
        of = np.repeat(np.arange(len(self), dtype=np.int32), self.counts)
        mine: npt.NDArray[np.int64] = of[self.owners == sequence].astype(np.int64)
        return mine


def read_cells(cursor: Cursor, form: CellForm) -> Cells:
    """A u32 count and so many cells. Raises `Corrupt` for what cannot be: a negative position, one that a
    sequence has twice, owners where there may be none."""
    num_cells = cursor.count("cells", 4 * (2 + form.words + (form.owners is not Owners.NONE)))
    start = cursor.at
    if form.owners is Owners.ANY:
        cells = _read_any(cursor, num_cells, form.words)
    else:
        cells = _read_alike(cursor, num_cells, form.words, int(form.owners is Owners.ONE))
    if num_cells and cells.positions.min() < 0:
        raise cursor.corrupt("a cell of a negative position", start)
    if len(cells.owners) and not 0 <= cells.owners.min() <= cells.owners.max() < MAX_OWNERS:
        raise cursor.corrupt(f"a cell of a sequence beyond 0 to {MAX_OWNERS - 1}", start)
    if form.owners is Owners.ONE and num_cells and (cells.owners != cells.owners[0]).any():
        raise cursor.corrupt("cells of several sequences in the state of one", start)
    if _any_twice(cells, form):
        raise cursor.corrupt("two cells of one sequence have the same position", start)
    return cells


def write_cells(cells: Cells, form: CellForm) -> Iterator[Bytes]:
    """What `read_cells` reads."""
    head = 2 + form.words
    sizes = head + cells.counts.astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    flat = np.empty(int(sizes.sum()), "<i4")
    is_owner = np.ones(len(flat), np.bool_)
    for word in range(head):
        is_owner[starts + word] = False
    flat[starts], flat[starts + 1] = cells.positions, cells.counts
    if cells.extension is not None:
        for word in range(form.words):
            flat[starts + 2 + word] = cells.extension[:, word]
    flat[is_owner] = cells.owners
    yield np.array([len(cells)], "<u4").tobytes()
    yield flat.tobytes()


def cells_of(positions: Words, owner: int | None, extension: Words | None = None) -> Cells:
    """Cells that have one owner, or none, all of them."""
    count = int(owner is not None)
    return Cells(
        positions,
        np.full(len(positions), count, np.int32),
        np.full(len(positions) * count, owner or 0, np.int32),
        extension,
    )


def _read_alike(cursor: Cursor, num_cells: int, words: int, count: int) -> Cells:
    start, width = cursor.at, 2 + words + count
    table = cursor.words(num_cells * width, "cells").reshape(num_cells, width)
    if (table[:, 1] != count).any():
        raise cursor.corrupt(f"a cell of other than {count} owners", start)
    extension = table[:, 2 : 2 + words] if words else None
    return Cells(table[:, 0], table[:, 1], table[:, 2 + words :].reshape(-1), extension)


def _read_any(cursor: Cursor, num_cells: int, words: int) -> Cells:
    """Cells differ in size where they differ in owners, which few contexts have: a first look takes them to
    be alike."""
    start, head = cursor.at, 2 + words
    if num_cells:
        count = Cursor(cursor.data, start + 4).u32("the owners of a cell")
        if 1 <= count <= MAX_OWNERS and num_cells * (head + count) * 4 <= cursor.left:
            table = np.frombuffer(cursor.data, "<i4", num_cells * (head + count), start)
            if (table.reshape(num_cells, head + count)[:, 1] == count).all():
                return _read_alike(cursor, num_cells, words, count)
    all_words = cursor.data[start : start + cursor.left // 4 * 4].cast("i")
    starts = np.empty(num_cells, np.int64)
    at = 0
    for cell in range(num_cells):
        if at + head > len(all_words):
            raise cursor.corrupt("cells go on beyond the end", start + 4 * at)
        count = all_words[at + 1]
        if not 1 <= count <= MAX_OWNERS:
            raise cursor.corrupt(f"a cell of {count} owners", start + 4 * at)
        starts[cell] = at
        at += head + count
    flat = cursor.words(at, "cells")
    is_owner = np.ones(at, np.bool_)
    for word in range(head):
        is_owner[starts + word] = False
    extension = np.empty((num_cells, words), np.int32) if words else None
    if extension is not None:
        for word in range(words):
            extension[:, word] = flat[starts + 2 + word]
    return Cells(flat[starts], flat[starts + 1], flat[is_owner], extension)


def _any_twice(cells: Cells, form: CellForm) -> bool:
    """Whether a sequence has a position twice. Tokens of a picture share one, and differ in their place."""
    if form.places and not form.words:
        return False  # their places were not stored
    if not len(cells.owners):
        return _twice(cells, np.arange(len(cells)), form)
    return any(_twice(cells, cells.owned_by(int(each)), form) for each in np.unique(cells.owners))


def _twice(cells: Cells, of: npt.NDArray[np.int64], form: CellForm) -> bool:
    columns = [cells.positions[of]]
    if form.places and cells.extension is not None:
        columns += [cells.extension[of, 0], cells.extension[of, 1]]
    order = np.lexsort(columns)
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for column in columns:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    return bool(same.any())

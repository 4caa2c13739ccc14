"""Interleaved sliding windows: parts that keep everything beside parts that keep the last tokens' rows."""

from __future__ import annotations

from engine.cache.cells import CellTable
from engine.cache.memory import MemorySpec, RowsSpec

#: cells that a sequence may fill beyond its window before old ones are taken, at least
SLACK = 256
PAD = 256


def window_table(spec: MemorySpec) -> CellTable | None:
    """The table of the window rows, None where no part has a window.

    With `full_windows` nothing is ever dropped, so that every position can be resumed and shifted.
    """
    window = longest_window(spec)
    if window is None:
        return None
    return CellTable(window_cells(spec, window), spec.num_seqs, None if spec.full_windows else window)


def window_cells(spec: MemorySpec, window: int) -> int:
    """How many cells the window rows get.

    Each sequence has room for its window and a whole batch beyond, so that no plan writes over a row that
    the sequence needs where the plan begins: a rollback finds it.
    """
    if spec.full_windows:
        return spec.num_cells
    share = -(-(window + max(spec.max_batch, SLACK)) // PAD) * PAD
    return min(share * spec.num_seqs, spec.num_cells)


def longest_window(spec: MemorySpec) -> int | None:
    rows = (need for need in spec.needs.parts if isinstance(need, RowsSpec))
    return max((need.window.size for need in rows if need.window is not None), default=None)

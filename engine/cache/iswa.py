"""Interleaved sliding windows: layers that see everything beside layers that see the last tokens."""

from __future__ import annotations

from engine.cache.cells import CellTable
from engine.cache.kv import KvMemory
from engine.cache.memory import MemorySpec
from engine.errors import ConfigError

#: cells that a sequence may fill beyond its window before old ones are taken, at least
SLACK = 256
PAD = 256


def window_cells(spec: MemorySpec) -> int:
    """How many cells the window layers get.

    Each sequence has room for its window and a whole batch beyond, so that no plan writes over a row that
    the sequence needs where the plan begins: a rollback finds it.
    """
    if spec.full_windows:
        return spec.num_cells
    window = longest_window(spec)
    share = -(-(window + max(spec.max_batch, SLACK)) // PAD) * PAD
    return min(share * spec.num_seqs, spec.num_cells)


def longest_window(spec: MemorySpec) -> int:
    sizes = [layer.window.size for layer in spec.layers if layer.window is not None]
    if not sizes:
        raise ConfigError("kind 'iswa': no layer has a window")
    return max(sizes)


def build_iswa(spec: MemorySpec) -> KvMemory:
    """Full layers as long as the context, window layers as long as their window asks for.

    With `full_windows` nothing is ever dropped, so that every position can be resumed and shifted.
    """
    window = None if spec.full_windows else longest_window(spec)
    windowed = CellTable(window_cells(spec), spec.num_seqs, window)
    return KvMemory(spec, CellTable(spec.num_cells, spec.num_seqs), windowed)

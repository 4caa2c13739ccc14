"""What tests of models with latent attention share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.cache.rows import Slot
from engine.cache.table import INDEX
from engine.runner import Engine
from engine.state import SeqId
from tests.oracles.base import open_engine, tokens, write

KEPT, DISCARDED, LENGTH = 7, 12, 40


def first_rows(engine: Engine, seq: SeqId, name: str) -> torch.Tensor:
    """float32 [length, size] of the first layer, in the order of positions and un-rotated."""
    part = engine._memory._parts.rows[name, 0]
    cells = part.table.cells_of(seq, 0, engine.length(seq))
    return part.buffer.read_plain(Slot.of(cells, torch.device("cpu")))[:, 0].clone()


#: what the values of a row, which are about 1, may lose when they are stored and stored again
LOSS = {"f32": 2e-5, "f16": 5e-3, "q8_0": 0.15}


def check_shift(
    family: str, folder: Path, dtype: str, names: tuple[str, ...] = ("kv.k",), **changes: Any
) -> None:
    """Rows of the first layer, which depend on their tokens and positions alone, are after a discard those of
    a text that never had what is gone."""
    write(family, folder, **changes)
    engine = open_engine(folder, type_k=dtype, type_v=dtype, full_windows=True)
    ids = tokens(count=LENGTH)
    moved, plain = engine.create(), engine.create()
    engine.feed(moved, ids)
    before = {name: first_rows(engine, moved, name) for name in names}
    assert engine.shift(moved, KEPT, DISCARDED) == DISCARDED
    engine.feed(plain, ids[:KEPT] + ids[KEPT + DISCARDED :])
    for name in names:
        ours, expected = first_rows(engine, moved, name), first_rows(engine, plain, name)
        torch.testing.assert_close(ours, expected, atol=LOSS[dtype], rtol=0)
        unmoved = before[name][KEPT + DISCARDED :]
        assert (expected[KEPT:] - unmoved).abs().max() > 0.5, "positions change these rows"


def check_index_keys_are_rotated(family: str, folder: Path) -> None:
    write(family, folder)
    engine = open_engine(folder)
    assert INDEX in engine._memory.rotated
    assert "kv.k" not in engine._memory.rotated

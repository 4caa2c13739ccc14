"""What rank 0 says arrives as it was said."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batch import Batch
from engine.parallel.messages import (
    Apply,
    Commit,
    Edit,
    End,
    Load,
    Message,
    Plan,
    Restore,
    Rollback,
    Snapshot,
    decode,
    encode,
)

MESSAGES: tuple[Message, ...] = (
    Load("/models/one", {"n_ctx": None, "tp": 2, "dtype": "f32", "full_windows": True}),
    Plan(b"\x01" * 8, b"", b"", None),
    Apply(3),
    Commit(),
    Rollback(),
    Edit("remove", [None, 0, None]),
    Snapshot(1, 256),
    Restore("restore", 0, b"\x00" * 16, [["token", 0, 2]], [1, 2]),  # type: ignore[list-item]
    End(),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_each_word(message: Message) -> None:
    assert decode(encode([message])) == [message]


def test_several_words_keep_their_order() -> None:
    assert decode(encode(MESSAGES)) == list(MESSAGES)


@pytest.mark.parametrize("grid", [None, np.arange(6).reshape(3, 2)])
def test_a_batch(grid: np.ndarray | None) -> None:
    """But for its outputs: only rank 0 has the output matrix."""
    batch = Batch(
        np.array([5, 6, 7]), np.array([0, 1, 0]), np.array([1, 1, 0]), np.array([0, 1, 1], bool), grid
    )
    (plan,) = decode(encode([Plan.of(batch)]))
    assert isinstance(plan, Plan)
    for name in ("tokens", "positions", "seqs"):
        assert np.array_equal(getattr(plan.batch, name), getattr(batch, name))
    assert not plan.batch.outputs.any()
    assert (plan.batch.grid is None) if grid is None else np.array_equal(plan.batch.grid, grid)

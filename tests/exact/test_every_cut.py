"""Saved at any position and restored through the real serialization, a sequence goes on bit for bit.

The whole grid, every position from 0 to 96 with every cache dtype, is `make test-all`; `make test` runs
the cuts around every border of window, block, ring and pool there is in these models, with one dtype.
"""

from __future__ import annotations

import pytest

from sessions.manager import SessionManager
from sessions.stores.memory import MemoryStore
from tests.exact.members import MEMBERS, OTHERS, open_member
from tests.exact.running import STEPS, failing_cuts, run_live
from tests.oracles import base

LAST = 96
FEW = (1, 15, 16, 33, 64, 95)
GATE = (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 47, 64, 95, 96)


def grid() -> list[object]:
    return [
        pytest.param(member.family, dtype, cuts, marks=marks)
        for member in MEMBERS.values()
        for dtype in member.dtypes
        for cuts, marks in ((GATE, ()), (range(LAST + 1), (pytest.mark.slow, pytest.mark.timeout(1800))))
        if dtype == member.dtypes[-1] or marks
    ]


@pytest.mark.parametrize(("family", "dtype", "cuts"), grid(), ids=lambda value: str(value)[:12])
def test_what_was_saved_at_a_cut_goes_on_bit_for_bit(family: str, dtype: str, cuts: tuple[int, ...]) -> None:
    manager = SessionManager(MemoryStore(), open_member(family, dtype))
    live = run_live(manager, base.tokens(3, LAST + STEPS), set(cuts))
    assert failing_cuts(open_member(family, dtype), manager, live) == {}


@pytest.mark.parametrize("family", list(OTHERS))
def test_every_other_architecture_goes_on_bit_for_bit_too(family: str) -> None:
    dtype = OTHERS[family].dtypes[-1]
    manager = SessionManager(MemoryStore(), open_member(family, dtype))
    live = run_live(manager, base.tokens(3, FEW[-1] + STEPS), FEW)
    assert failing_cuts(open_member(family, dtype), manager, live) == {}

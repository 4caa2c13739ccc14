"""A state is as large as its layout says, and never larger than what llama.cpp stores of the same."""

from __future__ import annotations

import pytest

from engine.state import PartKind, parts_of
from serialization.snapshot import write_state
from serialization.trim import trimmed
from sessions.stores.memory import MemoryStore
from tests.exact.members import MEMBERS, open_member
from tests.exact.sizes import LENGTH, PAGE, ours, render, theirs
from tests.oracles import base


@pytest.mark.parametrize("member", MEMBERS.values(), ids=list(MEMBERS))
def test_no_state_is_larger_than_llama_cpps(member) -> None:  # type: ignore[no-untyped-def]
    layout = open_member(member.family, "bf16").layout
    for length in (100, LENGTH, 100_000):
        assert ours(layout, length).total <= theirs(member, layout, length)


@pytest.mark.parametrize("family", list(MEMBERS))
def test_a_snapshot_has_the_bytes_that_the_formula_says(family: str) -> None:
    engine = open_member(family, "bf16")
    seq = engine.create()
    engine.feed(seq, base.tokens(9, 150))
    state = engine.snapshot(seq)
    sizes = ours(engine.layout, 150)
    assert sum(run.nbytes for run in state.rows_of(PartKind.TOKEN)) == sizes.token
    assert sum(run.nbytes for run in state.rows_of(PartKind.BLOCK)) == sizes.block
    assert sum(part.numel() for point in state.points for part in point.parts) == sizes.point
    written = write_state(MemoryStore(), trimmed(state, None, 0), None, 0)
    windows = [chunk.blob(PartKind.WINDOW) for chunk in written.chunks]
    stored = sum(blob.ref.raw_nbytes for blob in windows if blob is not None)
    row = sum(spec.row_nbytes for spec in parts_of(engine.layout, PartKind.WINDOW))
    assert stored == sizes.window + row, "the window, and one row more for the canary"


def test_the_page_of_sizes_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == render(), "`make docs` makes it anew"

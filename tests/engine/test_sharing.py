"""A new sequence shares the rows of the longest past that is known, and no sequence notices another."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import NoSlot
from engine.reading import FeedResult
from engine.runner import Engine
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import begun, picture, said

PAST = [(7 * i) % 250 for i in range(120)]


def fed(engine: Engine, ids: list[int]) -> FeedResult:
    return engine.feed(engine.create(), ids)


def test_the_longest_known_prefix_is_shared(engine: Engine) -> None:
    begun(engine, PAST[:40])
    begun(engine, PAST[:90])
    assert engine.known_prefix(PAST) == 90
    assert fed(engine, PAST) == FeedResult(90, 30)


def test_the_last_token_is_always_computed(engine: Engine) -> None:
    begun(engine, PAST)
    assert fed(engine, PAST) == FeedResult(119, 1)


def test_shared_rows_take_no_cells(engine: Engine) -> None:
    begun(engine, PAST)
    free = engine._memory.free_cells()
    fed(engine, [*PAST, 1, 2, 3])
    assert engine._memory.free_cells() == free - 3


def test_a_closed_sequence_is_a_prefix_still(engine: Engine) -> None:
    engine.close(begun(engine, PAST))
    assert fed(engine, [*PAST, 1]) == FeedResult(120, 1)


@pytest.mark.parametrize("windowed", [False, True])
def test_what_follows_a_shared_prefix_is_what_follows_a_read_one(
    windowed: bool, make_engine: MakeEngine, tiny_path: Path, windowed_path: Path
) -> None:
    path = windowed_path if windowed else tiny_path
    engine, alone = make_engine(path), make_engine(path)
    source = begun(engine, PAST)
    before = picture(engine, source)
    seq = engine.create()
    assert engine.feed(seq, [*PAST, 9, 8, 7]).shared == 120
    assert said(engine, seq, 80) == said(alone, begun(alone, [*PAST, 9, 8, 7]), 80)
    assert picture(engine, source) == before


def test_rows_that_are_shared_outlive_their_maker(engine: Engine, make_engine: MakeEngine) -> None:
    source, alone = begun(engine, PAST), make_engine()
    seq = engine.create()
    engine.feed(seq, [*PAST, 5])
    engine.rewind(source, 0)
    engine.feed(source, [200] * 150)
    assert said(engine, seq, 20) == said(alone, begun(alone, [*PAST, 5]), 20)


def test_windows_are_shared_as_far_as_they_reach(make_engine: MakeEngine, windowed_path: Path) -> None:
    """The window rows behind a fork in the road are gone by the time the road is long."""
    sizes = {"n_ctx": 2048, "num_cells": 4096, "num_seqs": 2, "max_batch": 64, "max_ubatch": 64}
    engine = make_engine(windowed_path, **sizes)
    ids = [i % 250 for i in range(1900)]
    begun(engine, ids)
    assert engine.known_prefix([*ids, 1]) == 1900
    assert engine.known_prefix([*ids[:1800], 251, 251]) == 1800
    parted = [*ids[:100], *([251] * 50)]
    assert engine.known_prefix(parted) == 0
    assert fed(engine, parted) == FeedResult(0, 150)


def test_shifted_rows_are_no_prefix(engine: Engine) -> None:
    seq = begun(engine, PAST)
    engine.shift(seq, 10, 30)
    assert engine.known_prefix([*PAST[:10], *PAST[40:], 1]) == 10
    assert engine.known_prefix(PAST) == 10


def test_a_rewound_part_is_no_prefix(engine: Engine) -> None:
    seq = begun(engine, PAST)
    engine.rewind(seq, 50)
    assert engine.known_prefix(PAST) == 50


def test_idle_prefixes_give_way_the_least_recently_used_first(make_engine: MakeEngine) -> None:
    engine = make_engine(num_cells=400, n_ctx=400)
    pasts = [[start] * 100 for start in (1, 2, 3)]
    for past in pasts:
        engine.close(begun(engine, past))
    assert engine.known_prefix([*pasts[0], 9]) == 100  # asked for: now the second is the oldest
    begun(engine, [50] * 150)
    assert [engine.known_prefix([*past, 9]) for past in pasts] == [100, 0, 100]


def test_live_sequences_never_give_way(make_engine: MakeEngine) -> None:
    engine = make_engine(num_cells=256, n_ctx=256)
    first = begun(engine, PAST)
    begun(engine, [200] * 100)
    before, seq = picture(engine, first), engine.create()
    with pytest.raises(NoSlot):
        engine.feed(seq, [100] * 60)
    assert (engine.tokens(seq), engine.edge(seq)) == ((), None)
    assert picture(engine, first) == before
    engine.feed(seq, [100] * 30)


def test_idle_prefixes_give_way_to_sequences(make_engine: MakeEngine) -> None:
    engine = make_engine(num_seqs=2)
    for start in range(6):
        engine.close(begun(engine, [start] * 20))
    seqs = [engine.create(), engine.create()]
    with pytest.raises(NoSlot, match="all 2"):
        engine.create()
    assert len(set(seqs)) == 2
    assert engine.known_prefix([5] * 21) == 20, "one spare place keeps the last of them"

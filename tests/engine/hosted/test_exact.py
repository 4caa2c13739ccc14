"""A state of a hosted model goes on as the live sequence does, bit for bit, whatever its cache is made of."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from engine.runner import Engine
from engine.state import PartKind, SamplerParams
from tests.engine.hosted.models import FAMILIES, OWN, WINDOW, forget, hosted, ids, said, tiny

T, W, P = PartKind.TOKEN, PartKind.WINDOW, PartKind.POINT

#: which of the four kinds of part each family has
KINDS = {
    "llama": {T},
    "own": {T},
    "own_bamba": {T, P},
    "qwen2": {T},
    "glm_moe_dsa": {T},
    "mistral": {W},
    "gemma3": {T, W},
    "mamba": {P},
    "mamba2": {P},
    "inkling": {T, W, P},
    "falcon_h1": {T, P},
    "jamba": {T, P},
    "bamba": {T, P},
    "qwen3_next": {T, P},
    "lfm2": {T, P},
}
LINE = ids(80)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@cache
def engine_of(family: str, dtype: str) -> Engine:
    return hosted(tiny(family, DTYPES[dtype]))


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(str(request.param), "f32")


def go_on_alike(engine: Engine, cut: int) -> None:
    live = engine.create()
    engine.feed(live, LINE[:cut])
    restored = engine.restore(engine.snapshot(live))
    other = engine.create()
    engine.feed(other, ids(9, seed=cut))
    rest = LINE[cut : cut + 6]
    assert torch.equal(said(engine, live, rest), said(engine, restored, rest)), cut
    forget(engine, live, restored, other)


def test_every_family_is_tried() -> None:
    assert {*FAMILIES, *OWN} == set(KINDS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", KINDS)
def test_the_layout_has_the_parts_that_the_family_has_and_restored_goes_on_as_live(
    family: str, dtype: str
) -> None:
    engine = engine_of(family, dtype)
    assert {spec.kind for spec in engine.layout} == KINDS[family]
    assert {spec.window for spec in engine.layout if spec.kind is W} <= {WINDOW - 1}
    assert {spec.dtype for spec in engine.layout if spec.kind is not P} <= {dtype}
    for cut in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 5):
        go_on_alike(engine, cut)


def test_a_snapshot_is_the_same_once_it_was_restored(engine: Engine) -> None:
    live = engine.create(SamplerParams(temperature=0.5, seed=3))
    engine.feed(live, LINE[:40])
    state = engine.snapshot(live)
    restored = engine.restore(state)
    again = engine.snapshot(restored)
    assert again.tokens == state.tokens == tuple(LINE[:40])
    assert again.sampler == state.sampler
    for one, other in zip(state.rows, again.rows, strict=True):
        assert (one.kind, one.start, one.stop) == (other.kind, other.start, other.stop)
        assert all(torch.equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))
    for a, b in zip(state.points, again.points, strict=True):
        assert a.position == b.position
        assert all(torch.equal(x, y) for x, y in zip(a.parts, b.parts, strict=True))
    forget(engine, live, restored)


def test_a_fork_and_its_origin_know_nothing_of_each_other(engine: Engine) -> None:
    one = engine.create()
    engine.feed(one, LINE[:20])
    two, three = engine.fork(one), engine.fork(one)
    first = said(engine, one, LINE[20:26])
    said(engine, two, ids(6, seed=9))
    assert torch.equal(first, said(engine, three, LINE[20:26]))
    forget(engine, one, two, three)


def test_a_rewind_to_a_mark_goes_on_as_it_did_then_and_so_does_its_state(engine: Engine) -> None:
    seq = engine.create()
    engine.feed(seq, LINE[:25])
    engine.mark(seq)
    then = said(engine, seq, LINE[25:31])
    engine.feed(seq, ids(WINDOW + 3, seed=4))
    assert engine.last_resumable(seq, 25) == 25
    engine.rewind(seq, 25)
    restored = engine.restore(engine.snapshot(seq))
    assert torch.equal(then, said(engine, seq, LINE[25:31]))
    assert torch.equal(then, said(engine, restored, LINE[25:31]))
    forget(engine, seq, restored)


def test_what_is_read_in_pieces_is_what_is_read_at_once(engine: Engine) -> None:
    whole, pieces = engine.create(), engine.create()
    engine.feed(whole, LINE[:40])
    expected = engine.logits(whole)
    forget(engine, whole)
    for start, stop in ((0, 7), (7, 8), (8, 30), (30, 40)):
        engine.feed(pieces, LINE[start:stop])
    found = engine.logits(pieces)
    assert expected is not None
    assert found is not None
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    forget(engine, pieces)

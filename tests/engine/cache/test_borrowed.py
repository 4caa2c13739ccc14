"""A draft reads its target's rows, takes no cell, copies no table, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.cache.borrowed import BorrowedMemory
from engine.cache.cells import CellTable
from engine.cache.memory import KEYS, Memory, RowsSpec
from engine.cache.parts_memory import PartsMemory
from engine.cache.rows import RowBuffer
from engine.errors import BatchRefused, ConfigError, EditRefused, StateError
from engine.state import PartKind, Point, Rows, SeqId
from tests.engine.cache.harness import A, B, C, batch_of
from tests.engine.cache.members import (
    SCALE,
    compute_plan,
    definition,
    everything,
    feed,
    member_spec,
    next_batch,
    queries,
    rows_of,
    tiny_memory,
    visible_to,
)

#: the draft's layers 0 and 1 read a full layer and one with a window
LAYERS = {0: 0, 1: 1}


def pair(kind: str = "iswa", **options: object) -> tuple[PartsMemory, BorrowedMemory]:
    source = tiny_memory(member_spec(kind, **options))  # type: ignore[arg-type]
    return source, BorrowedMemory(source, LAYERS)


def keys_of(source: PartsMemory, layer: int) -> RowsSpec:
    return source._parts.rows[KEYS, layer].need


def read(source: PartsMemory, draft: Memory, batch: Batch) -> dict[int, torch.Tensor]:
    """What the draft's layers attend to, by layer; rows as in the batch."""
    plan = draft.plan(batch)
    out: dict[int, list[torch.Tensor]] = {layer: [] for layer in LAYERS}
    for index, ubatch in enumerate(plan.ubatches):
        view = plan.apply(index)
        for layer, lent in LAYERS.items():
            q = queries(keys_of(source, lent), ubatch.tokens.tolist())
            out[layer].append(view.attend(layer, q, None, None, SCALE))
    plan.commit()
    return {layer: torch.cat(parts) for layer, parts in out.items()}


def expected(source: PartsMemory, layer: int, past: range, own: list[int], at: list[int]) -> torch.Tensor:
    k_need = keys_of(source, layer)
    v_need = source._parts.rows["kv.v", layer].need
    k, v = (rows_of(need, past, range(len(past))) for need in (k_need, v_need))
    sight = visible_to(at, range(len(past)), k_need.window)
    return definition(queries(k_need, own), k, v, sight, SCALE)


@pytest.mark.parametrize("max_ubatch", [2, 32])
@pytest.mark.parametrize("kind", ["iswa", "hybrid_iswa"])
def test_a_draft_sees_what_its_target_has_stored(kind: str, max_ubatch: int) -> None:
    source, draft = pair(kind, max_ubatch=max_ubatch)
    feed(source.spec, source, (A, range(9)), (B, range(50, 54)))
    before = everything(source)
    # Three steps at the place of the next token, and one that begins where the last one is.
    for own, at in (([100], [9]), ([101], [9]), ([102], [9]), ([8, 103], [8, 9])):
        out = read(source, draft, batch_of((A, at[0], own), (B, 4, [200])))
        for layer, lent in LAYERS.items():
            wanted = expected(source, lent, range(9), own, at)
            assert torch.allclose(out[layer][: len(own)].double(), wanted, atol=1e-5)
            wanted = expected(source, lent, range(50, 54), [200], [4])
            assert torch.allclose(out[layer][len(own) :].double(), wanted, atol=1e-5)
    assert everything(source) == before


def test_a_draft_may_look_from_any_place_whose_rows_are_there() -> None:
    source = tiny_memory(member_spec("iswa", max_batch=4), window_cells=9)
    draft = BorrowedMemory(source, LAYERS)
    for start in range(0, 20, 4):
        feed(source.spec, source, (A, range(start, start + 4)))
    can = [at for at in range(22) if source.can_read_at(A, at, LAYERS.values())]
    assert can == list(range(13, 21))
    for at in can:
        out = read(source, draft, batch_of((A, at, [at])))
        for layer, lent in LAYERS.items():
            assert torch.allclose(
                out[layer].double(), expected(source, lent, range(20), [at], [at]), atol=1e-5
            )
    for at in (12, 21):
        with pytest.raises(BatchRefused, match=f"no rows that a token at {at} could read"):
            draft.plan(batch_of((A, at, [1])))


def test_a_full_target_can_be_drafted_for() -> None:
    source, draft = pair(num_cells=9)
    feed(source.spec, source, (A, range(9)))
    assert source.free_cells() == draft.free_cells() == 0
    read(source, draft, batch_of((A, 9, [1])))


def test_it_does_not_matter_which_is_made_or_filled_first() -> None:
    source = tiny_memory(member_spec("iswa"))
    early = BorrowedMemory(source, LAYERS)
    feed(source.spec, source, (A, range(7)))
    before = everything(source)
    late = BorrowedMemory(source, LAYERS)
    assert everything(source) == before
    one, other = (read(source, draft, batch_of((A, 7, [1]))) for draft in (early, late))
    assert all(torch.equal(one[layer], other[layer]) for layer in LAYERS)
    state = source.snapshot(A)
    early.restore(B, tuple(range(7)), *early.snapshot(A))
    source.restore(B, tuple(range(7)), *state)
    late.restore(B, tuple(range(7)), (), ())
    again = read(source, late, batch_of((B, 7, [1])))
    assert all(torch.equal(one[layer], again[layer]) for layer in LAYERS)


def test_no_table_and_no_row_is_made_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_memory(member_spec("iswa"))
    feed(source.spec, source, (A, range(7)))

    def refuse(*_: object) -> None:
        raise AssertionError("something was allocated")

    monkeypatch.setattr(CellTable, "__init__", refuse)
    monkeypatch.setattr(RowBuffer, "__init__", refuse)
    drafts = [BorrowedMemory(source, LAYERS) for _ in range(3)]
    for draft in drafts:
        read(source, draft, batch_of((A, 7, [1])))


def test_what_the_target_does_the_draft_sees() -> None:
    source, draft = pair("kv")
    feed(source.spec, source, (A, range(7)))
    source.copy(A, B)
    source.discard(B, 2, 4)
    assert (draft.pos_min(B), draft.pos_max(B)) == (0, 4)
    assert draft.tokens_at(B, 0, 9) == source.tokens_at(B, 0, 9) == (0, 1, 4, 5, 6)
    assert [draft.can_resume_at(B, at) for at in (5, 6)] == [True, False]
    assert draft.last_resumable(B, 9) == 5
    assert draft.pos_max(C) is None
    with pytest.raises(BatchRefused, match="no rows that a token at 0 could read"):
        draft.plan(batch_of((C, 0, [1])))


def test_rows_of_other_parts_can_be_read_too() -> None:
    source = tiny_memory(member_spec("hybrid_idx"))
    (seen,) = feed(source.spec, source, (A, range(8)))
    plan = BorrowedMemory(source, {5: 0}).plan(batch_of((A, 8, [1])))
    view = plan.apply(0)
    (segment,) = view.segments
    assert view.positions.tolist() == [8]
    assert view.held(KEYS, 5, segment).positions.tolist() == list(range(8))
    assert torch.equal(view.blocks("pool.k", 5, segment), next(iter(seen.blocks.values())))
    assert view.previous_tokens(3).tolist() == [[5, 6, 7]]
    x = torch.zeros(4)
    assert view.into_basis(KEYS, 5, x) is x
    plan.rollback()


def test_whatever_would_change_the_target_is_refused() -> None:
    source, draft = pair("hybrid_iswa")
    feed(source.spec, source, (A, range(7)))
    before = everything(source)
    plan = draft.plan(batch_of((A, 7, [1])))
    view = plan.apply(0)
    x = torch.zeros((1, 1, 4))
    verbs: list[Callable[[], object]] = [
        lambda: draft.remove(A, 3, None),
        lambda: draft.remove(None, 0, None),
        lambda: draft.copy(A, B),
        lambda: draft.keep(A),
        lambda: draft.shift(A, 0, None, 1),
        lambda: draft.discard(A, 0, 1),
        lambda: draft.divide(A, 0, None, 2),
        lambda: view.attend(0, x, x, x, SCALE),
        lambda: view.attend(0, x, None, x, SCALE),
        lambda: view.append(KEYS, 0, x),
        lambda: view.close("pool.k", 0, view.segments[0], x),
        lambda: view.set_point("ssm.state", 1, x),
        lambda: view.point("ssm.state", 1),
    ]
    for verb in verbs:
        with pytest.raises(EditRefused, match="only reads"):
            verb()
    draft.mark(A)
    assert draft.refuse_shift() is not None
    assert everything(source) == before
    plan.rollback()
    assert everything(source) == before


def test_a_draft_has_no_state_of_its_own() -> None:
    source, draft = pair()
    feed(source.spec, source, (A, range(7)))
    assert draft.layout == ()
    assert draft.rotated == ()
    assert draft.snapshot(A) == ((), ())
    before = everything(source)
    for rows, points in (((Rows(PartKind.TOKEN, 0, 7, ()),), ()), ((), (Point(7, ()),))):
        with pytest.raises(StateError, match="a memory that has none"):
            draft.restore(B, tuple(range(7)), rows, points)
    assert everything(source) == before


def test_a_batch_that_makes_no_sense_is_refused() -> None:
    source, draft = pair(max_batch=4)
    feed(source.spec, source, (A, range(4)))
    hole = Batch(np.array([1, 2]), np.array([1, 3]), np.array([0, 0]), np.array([True, True]))
    same = Batch(np.array([1, 2]), np.array([4, 4]), np.array([0, 0]), np.array([True, True]))
    for batch in (
        hole,
        same,
        batch_of((A, 5, [1])),
        batch_of((A, 3, [1, 2, 3])),
        batch_of((SeqId(3), 0, [1])),
        batch_of((A, 0, range(5))),
        batch_of((A, 4, [])),
    ):
        with pytest.raises(BatchRefused):
            draft.plan(batch)


def test_layers_that_the_target_has_not_are_refused() -> None:
    source = tiny_memory(member_spec("hybrid"))
    with pytest.raises(ConfigError, match="layer 3 borrows from layer 1, which has no part"):
        BorrowedMemory(source, {2: 0, 3: 1})


def test_the_target_goes_on_as_if_nobody_had_read() -> None:
    outputs = []
    for drafted in (False, True):
        source, draft = pair("hybrid_iswa", max_ubatch=4)
        feed(source.spec, source, (A, range(7)))
        seen = []
        for token in range(100, 106):
            if drafted:
                end = source.pos_max(A)
                assert end is not None
                read(source, draft, batch_of((A, end + 1, [token])))
            plan = source.plan(next_batch(source, (A, [token])))
            seen += compute_plan(source.spec, plan)
            plan.commit()
        outputs.append([tensor for one in seen for tensor in one.tensors()])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_a_token_that_would_see_nothing_is_refused() -> None:
    source = tiny_memory(member_spec("iswa"))
    feed(source.spec, source, (A, range(4)))
    chunked = BorrowedMemory(source, {0: 2})  # in chunks of two
    chunked.plan(batch_of((A, 3, [1])))
    with pytest.raises(BatchRefused, match="no rows that a token at 4 could read"):
        chunked.plan(batch_of((A, 4, [1])))

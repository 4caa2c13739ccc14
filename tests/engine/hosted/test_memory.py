"""The memory of hosted models: what can be gone back to, what is shared, and nothing is left half done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.errors import CacheRefused, EditRefused, NoSlot, StateError
from engine.runner import Engine
from engine.state import PartKind, Pending, SequenceState
from tests.engine.hosted.models import WINDOW, forget, hosted, ids, said, tiny

LINE = ids(60)


# --- going back -----------------------------------------------------------------------------------


def test_rows_alone_can_be_cut_anywhere(llama: Engine) -> None:
    seq = llama.create()
    llama.feed(seq, LINE[:40])
    assert [llama.last_resumable(seq, at) for at in (0, 1, 13, 40, 99)] == [0, 1, 13, 40, 40]
    llama.rewind(seq, 13)
    assert llama.edge(seq) == Pending(LINE[13])
    fresh = llama.create()
    llama.feed(fresh, LINE[:13])
    again, first = said(llama, seq, LINE[13:20]), said(llama, fresh, LINE[13:20])
    assert (again - first).abs().max() < 1e-4
    forget(llama, seq, fresh)


def test_windows_can_be_cut_until_they_drop_a_row_and_then_by_one_token(gemma: Engine) -> None:
    seq = gemma.create()
    gemma.feed(seq, LINE[: WINDOW - 1])
    assert gemma.last_resumable(seq, 4) == 4
    gemma.feed(seq, LINE[WINDOW - 1 : WINDOW + 5])
    end = WINDOW + 5
    assert [gemma.last_resumable(seq, at) for at in (end, end - 1, end - 2)] == [end, end - 1, 0]
    with pytest.raises(EditRefused, match=f"cannot go on at {end - 2}: it has no checkpoint"):
        gemma.rewind(seq, end - 2)
    assert gemma.length(seq) == end
    before = gemma.logits(seq)
    gemma.rewind(seq, end - 1)
    gemma.feed(seq, [LINE[end - 1]])
    after = gemma.logits(seq)
    assert before is not None
    assert after is not None
    assert (before - after).abs().max() < 1e-4
    forget(gemma, seq)


def test_point_state_can_be_cut_at_its_marks_alone(bamba: Engine) -> None:
    seq = bamba.create()
    for at in (10, 20):
        bamba.feed(seq, LINE[at - 10 : at])
        bamba.mark(seq)
    bamba.feed(seq, LINE[20:33])
    assert [bamba.last_resumable(seq, at) for at in (33, 32, 20, 19, 9)] == [33, 20, 20, 10, 0]
    with pytest.raises(EditRefused, match="the nearest is at 20"):
        bamba.rewind(seq, 25)
    fork = bamba.fork(seq)
    assert bamba.last_resumable(fork, 32) == 20
    bamba.rewind(fork, 10)
    assert bamba.last_resumable(seq, 32) == 20
    forget(bamba, seq, fork)


def test_a_state_has_its_marks_as_checkpoints_and_goes_back_to_them(bamba: Engine) -> None:
    line, seq = ids(60, seed=31), bamba.create()
    for at in (10, 20):
        bamba.feed(seq, line[at - 10 : at])
        bamba.mark(seq)
    then = said(bamba, seq, line[20:33])
    state = bamba.snapshot(seq)
    assert [point.position for point in state.points] == [10, 20, 33]
    assert [point.position for point in bamba.snapshot(seq, 10).points] == [20, 33]
    forget(bamba, seq)
    restored = bamba.restore(state)
    assert bamba.last_resumable(restored, 32) == 20
    bamba.rewind(restored, 20)
    assert torch.equal(then, said(bamba, restored, line[20:33]))
    forget(bamba, restored)


def test_a_restored_sequence_can_go_back_to_where_it_was_restored(gemma: Engine) -> None:
    seq = gemma.create()
    gemma.feed(seq, LINE[:25])
    restored = gemma.restore(gemma.snapshot(seq))
    then = said(gemma, restored, LINE[25:31])
    gemma.feed(restored, ids(20, seed=3))
    assert gemma.last_resumable(restored, 40) == 25
    gemma.rewind(restored, 25)
    assert torch.equal(then, said(gemma, restored, LINE[25:31]))
    forget(gemma, seq, restored)


def test_a_mark_whose_window_rows_did_not_come_along_is_no_place_to_go_back_to() -> None:
    engine = hosted(tiny("inkling"))
    seq = engine.create()
    for at in (20, 22):
        engine.feed(seq, LINE[engine.length(seq) : at])
        engine.mark(seq)
    engine.feed(seq, LINE[22:23])
    state = engine.snapshot(seq)
    assert [point.position for point in state.points] == [20, 22, 23]
    restored = engine.restore(state)
    # There is one window row more than going on at the end needs.
    assert [engine.last_resumable(restored, at) for at in (22, 21)] == [22, 0]
    engine.rewind(seq, 22)
    engine.rewind(restored, 22)
    assert torch.equal(said(engine, seq, LINE[22:28]), said(engine, restored, LINE[22:28]))


def test_marks_give_way_where_their_bytes_are_too_many() -> None:
    each = sum(spec.row_nbytes for spec in hosted(tiny("mamba2")).layout)
    engine = hosted(tiny("mamba2"), checkpoint_bytes=4 * each)
    seq = engine.create()
    for at in range(0, 60, 4):
        engine.feed(seq, LINE[at : at + 4])
        engine.mark(seq)
    kept = {engine.last_resumable(seq, at) for at in range(1, 61)} - {0}
    assert 60 in kept
    assert len(kept) == 4


def test_a_prompt_leaves_checkpoints_by_itself() -> None:
    engine = hosted(tiny("bamba"), checkpoint_every=16)
    seq = engine.create()
    engine.feed(seq, LINE[:50])
    assert [engine.last_resumable(seq, at) for at in (49, 47, 31)] == [48, 32, 16]


# --- sharing --------------------------------------------------------------------------------------


def test_a_known_beginning_is_not_read_again(gemma: Engine, llama: Engine, bamba: Engine) -> None:
    for engine, known in ((llama, 30), (gemma, 30), (bamba, 25)):  # the windows had dropped one row
        first = engine.create()
        engine.feed(first, LINE[:25])
        engine.mark(first)
        engine.feed(first, LINE[25:31])
        engine.close(first)
        second = engine.create()
        result = engine.feed(second, [*LINE[:30], 7, 8, 9])
        assert (result.shared, result.computed) == (known, 33 - known)
        forget(engine, second)


def test_who_shares_a_batch_leaves_no_mark(llama: Engine) -> None:
    line = ids(15, seed=21)
    alone, beside, other = (llama.create() for _ in range(3))
    llama.feed(alone, line[:9])
    expected = said(llama, alone, line[9:15])
    llama.advance({beside: line[:9], other: ids(30, seed=5)})
    llama.advance({other: [5, 6], beside: line[9:12]})
    found = [llama.logits(beside)]
    for token in line[12:15]:
        llama.advance({beside: [token], other: [token + 1]})
        found.append(llama.logits(beside))
    assert torch.equal(expected, torch.stack([one for one in found if one is not None]))
    forget(llama, alone, beside, other)


def test_room_is_counted_in_tokens_of_all_sequences() -> None:
    engine = hosted(tiny("llama"), num_cells=50, n_ctx=40)
    one, two = engine.create(), engine.create()
    engine.feed(one, LINE[:30])
    with pytest.raises(NoSlot, match="no room for 25 tokens: 20 of 50"):
        engine.feed(two, ids(25, seed=3))
    assert engine.length(two) == 0
    with pytest.raises(NoSlot, match="no room for 30 tokens: 20 of 50"):
        engine.fork(one)
    with pytest.raises(NoSlot, match="no room for 30 tokens: 20 of 50"):
        engine.restore(engine.snapshot(one))
    engine.close(one)  # it gives way now
    engine.feed(two, ids(25, seed=3))


# --- nothing half done ----------------------------------------------------------------------------


class Failing(LlamaForCausalLM):
    """Fails in its last layer, when it is told to: its cache has grown by then."""

    fails = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self.fails:
            raise RuntimeError("out of memory")
        return out


def test_after_an_error_in_the_model_the_sequence_is_as_it_was() -> None:
    model = Failing(tiny("llama").config).eval()
    engine = hosted(model)
    seq, twin = engine.create(), engine.create()
    engine.advance({seq: LINE[:10], twin: LINE[:10]})
    model.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.feed(seq, LINE[10:15])
    model.fails = False
    assert engine.length(seq) == 10
    assert torch.equal(said(engine, seq, LINE[10:16]), said(engine, twin, LINE[10:16]))


def test_a_cache_that_lost_rows_on_the_way_is_found_out() -> None:
    model = tiny("llama")
    engine = hosted(model)
    seq = engine.create()
    engine.feed(seq, LINE[:10])
    layer = engine._memory._sequences[seq].cache.layers[1]  # type: ignore[attr-defined]
    layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    with pytest.raises(CacheRefused, match="layer 1 of the cache has 10 rows after 11 tokens, not 11"):
        engine.feed(seq, LINE[10:11])
    assert engine.length(seq) == 10


def damaged(state: SequenceState) -> list[SequenceState]:
    """It without something, in as many ways as it has what can be missing."""
    rows = state.rows
    short = [replace(one, stop=one.stop - 1) for one in rows]
    late = [replace(one, start=one.start + 2, parts=tuple(part[2:] for part in one.parts)) for one in rows]
    thin = [replace(one, parts=tuple(part[:, 1:] for part in one.parts)) for one in rows]
    fewer = [replace(one, parts=one.parts[1:]) for one in rows]
    wrong = [
        replace(state, rows=()),
        replace(state, rows=tuple(short)),
        replace(state, rows=(*rows[:-1], late[-1])),
        replace(state, rows=tuple(thin)),
        replace(state, rows=tuple(fewer)),
        replace(state, rows=(*rows, replace(rows[0], kind=PartKind.BLOCK))),
    ]
    points = state.points
    if points:
        wrong.append(replace(state, points=points[:-1]))
        wrong.append(replace(state, points=tuple(replace(one, parts=one.parts[1:]) for one in points)))
    return wrong


@pytest.mark.parametrize("family", ["gemma", "bamba"])
def test_a_state_that_lacks_something_is_refused_and_nothing_is_left(
    family: str, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(family)
    seq = engine.create()
    engine.feed(seq, LINE[:30])
    state = engine.snapshot(seq)
    forget(engine, seq)
    free = engine._memory.free_cells()
    for one in damaged(state):
        with pytest.raises(StateError):
            engine.restore(one)
        assert engine._memory.free_cells() == free
    engine.close(engine.restore(state))


def _askew(part: torch.Tensor) -> torch.Tensor:
    """The same bytes where no value of several could be read."""
    buffer = torch.empty(part.numel() + 1, dtype=torch.uint8)[1:].view(part.shape)
    return buffer.copy_(part)


def test_bytes_of_a_state_may_lie_anywhere(bamba: Engine) -> None:
    line, seq = ids(30, seed=41), bamba.create()
    bamba.feed(seq, line[:20])
    state = bamba.snapshot(seq)
    rows = tuple(replace(one, parts=tuple(map(_askew, one.parts))) for one in state.rows)
    points = tuple(replace(one, parts=tuple(map(_askew, one.parts))) for one in state.points)
    restored = bamba.restore(replace(state, rows=rows, points=points))
    assert torch.equal(said(bamba, seq, line[20:26]), said(bamba, restored, line[20:26]))
    forget(bamba, seq, restored)


def test_a_copy_on_the_device_goes_back(gemma: Engine) -> None:
    seq = gemma.create()
    gemma.feed(seq, LINE[:30])
    copy = gemma.device_snapshot(seq)
    then = said(gemma, seq, LINE[30:36])
    gemma.feed(seq, ids(20, seed=8))
    assert gemma.device_restore(copy, seq) == seq
    assert gemma.length(seq) == 30
    assert torch.equal(then, said(gemma, seq, LINE[30:36]))
    forget(gemma, seq)

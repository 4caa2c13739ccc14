"""Copies on the device are gone back to bit for bit; what is wrong with a handle is told, and harms none."""

from __future__ import annotations

import dataclasses
import gc
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.device_state import DeviceState, least_nbytes
from engine.errors import ConfigError, EngineError, HandleRefused, NoSlot
from engine.runner import Engine
from engine.state import DraftState, Fingerprint, NextLogits, SamplerParams, SeqId
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import begun, bits, picture, said

PAST = [(7 * i) % 250 for i in range(120)]
OTHER = [(5 * i + 3) % 250 for i in range(90)]


# --- going back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0", "q4_0"])
def test_a_sequence_goes_back_to_its_copy_bit_for_bit(
    dtype: str, windowed: bool, steps: int, make_engine: MakeEngine, tiny_path: Path, windowed_path: Path
) -> None:
    engine = make_engine(windowed_path if windowed else tiny_path, type_k=dtype, type_v=dtype)
    seq = begun(engine, PAST, steps=steps)
    engine.set_sampler(seq, SamplerParams(temperature=0.9, seed=4))
    handle, before = engine.device_snapshot(seq), everything(engine, seq)
    live = bits(engine, seq, 30)
    other = begun(engine, OTHER)
    for into in (seq, other, None):
        again = engine.device_restore(handle, into)
        assert again == into or into is None
        assert everything(engine, again) == before
        assert bits(engine, again, 30) == live


def everything(engine: Engine, seq: SeqId) -> list[object]:
    """All that can be asked of a sequence."""
    logits, canary = engine.logits(seq), engine.snapshot(seq).canary
    return [picture(engine, seq), None if logits is None else logits.tolist(), canary, engine.length(seq)]


def test_a_copy_is_not_changed_by_what_follows(engine: Engine) -> None:
    seq = begun(engine, PAST)
    handle, before = engine.device_snapshot(seq), everything(engine, seq)
    said(engine, seq, 5)
    engine.shift(seq, 10, 40)
    engine.rewind(seq, 0)
    engine.feed(seq, OTHER)
    assert everything(engine, engine.device_restore(handle, seq)) == before
    assert everything(engine, engine.device_restore(handle)) == before


def test_an_empty_sequence_has_a_copy_too(engine: Engine) -> None:
    seq = engine.create(SamplerParams(seed=5))
    handle = engine.device_snapshot(seq)
    assert (handle.length, handle.nbytes) == (0, 0)
    engine.feed(seq, PAST)
    engine.device_restore(handle, seq)
    assert (engine.tokens(seq), engine.edge(seq), engine.sampler(seq).seed) == ((), None, 5)
    assert engine.feed(seq, OTHER).computed == len(OTHER)


def test_logits_behind_a_pending_token_come_back(engine: Engine) -> None:
    seq = begun(engine, PAST, steps=1)
    logits = engine.logits(seq)
    assert logits is not None
    again = engine.logits(engine.device_restore(engine.device_snapshot(seq)))
    assert again is not None
    assert torch.equal(again, logits)


def test_a_copy_of_a_copy_is_the_same(engine: Engine) -> None:
    seq = begun(engine, PAST, steps=1)
    first, before = engine.device_snapshot(seq), everything(engine, seq)
    again = engine.device_restore(first)
    second = engine.device_snapshot(again)
    engine.close(seq)
    assert everything(engine, engine.device_restore(second)) == before
    assert second.nbytes == first.nbytes


def test_a_sequence_that_is_replaced_keeps_its_own_copy(engine: Engine) -> None:
    seq, other = begun(engine, PAST), begun(engine, OTHER)
    handle, own = engine.device_snapshot(seq), engine.device_snapshot(other)
    before = everything(engine, other)
    engine.device_restore(handle, other)
    assert everything(engine, engine.device_restore(own, other)) == before


def test_what_was_gone_back_to_is_a_known_prefix(engine: Engine) -> None:
    seq = begun(engine, PAST)
    handle = engine.device_snapshot(seq)
    engine.rewind(seq, 0)
    assert engine.known_prefix([*PAST, 1]) == 0
    engine.device_restore(handle, seq)
    assert engine.known_prefix([*PAST, 1]) == len(PAST)


# --- handles that are good no more ------------------------------------------------------------------


def stale(engine: Engine, seq: SeqId) -> DeviceState:
    handle = engine.device_snapshot(seq)
    engine.device_snapshot(seq)
    return handle


def stale_and_the_newer_one_freed(engine: Engine, seq: SeqId) -> DeviceState:
    handle = engine.device_snapshot(seq)
    engine.device_free(engine.device_snapshot(seq))
    return handle


def freed(engine: Engine, seq: SeqId) -> DeviceState:
    handle = engine.device_snapshot(seq)
    engine.device_free(handle)
    return handle


def closed(engine: Engine, seq: SeqId) -> DeviceState:
    other = begun(engine, OTHER)
    handle = engine.device_snapshot(other)
    engine.close(other)
    return handle


def reused(engine: Engine, seq: SeqId) -> DeviceState:
    """The id of its sequence is another's by now, which has a copy of its own."""
    other = engine.create()  # empty, so that its id is free again at once
    handle = engine.device_snapshot(other)
    engine.close(other)
    again = begun(engine, OTHER)
    assert again == other
    engine.device_snapshot(again)
    return handle


def foreign(engine: Engine, seq: SeqId) -> DeviceState:
    """Of an engine that is alike in everything: the same sequence, generation and size."""
    return dataclasses.replace(engine.device_snapshot(seq), engine=object())


def of_the_future(engine: Engine, seq: SeqId) -> DeviceState:
    handle = engine.device_snapshot(seq)
    return dataclasses.replace(handle, generation=handle.generation + 1)


def of_another_length(engine: Engine, seq: SeqId) -> DeviceState:
    return dataclasses.replace(engine.device_snapshot(seq), length=3)


def of_no_sequence(engine: Engine, seq: SeqId) -> DeviceState:
    return dataclasses.replace(engine.device_snapshot(seq), seq=SeqId(99))


def before_all(engine: Engine, seq: SeqId) -> DeviceState:
    return dataclasses.replace(engine.device_snapshot(seq), generation=-1)


REFUSED: dict[str, tuple[Callable[[Engine, SeqId], DeviceState], str]] = {
    "a newer one was made": (stale, "stale"),
    "a newer one was made and freed": (stale_and_the_newer_one_freed, "stale"),
    "it was freed": (freed, "freed"),
    "its sequence was closed": (closed, "removed"),
    "its sequence's id was used again": (reused, "removed"),
    "it is another engine's": (foreign, "foreign"),
    "it was never made": (of_the_future, "foreign"),
    "it says another length": (of_another_length, "foreign"),
    "there is no such sequence": (of_no_sequence, "foreign"),
    "it is older than all": (before_all, "removed"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_handle_that_is_not_good_is_refused_and_harms_nothing(why: str, make_engine: MakeEngine) -> None:
    make, reason = REFUSED[why]
    engine, twin = make_engine(), make_engine()
    seq, same = begun(engine, PAST), begun(twin, PAST)
    handle = make(engine, seq)
    before, free = everything(engine, seq), engine._memory.free_cells()
    kept = engine._device_states.nbytes()
    for verb in (
        lambda: engine.device_restore(handle),
        lambda: engine.device_restore(handle, seq),
        lambda: engine.device_free(handle),
    ):
        with pytest.raises(HandleRefused) as refused:
            verb()
        assert refused.value.details["reason"] == reason
        assert "\n" not in str(refused.value)
        assert refused.value.exit_code == 26
    assert everything(engine, seq) == before
    assert (engine._memory.free_cells(), engine._device_states.nbytes()) == (free, kept)
    assert bits(engine, seq, 10) == bits(twin, same, 10)


def test_a_handle_of_an_engine_with_other_rows_is_foreign(
    make_engine: MakeEngine, windowed_path: Path
) -> None:
    engine = make_engine()
    begun(engine, PAST)
    for other in (make_engine(), make_engine(type_k="q8_0"), make_engine(windowed_path)):
        handle = other.device_snapshot(begun(other, PAST))
        with pytest.raises(HandleRefused) as refused:
            engine.device_restore(handle)
        assert refused.value.details["reason"] == "foreign"


@pytest.mark.parametrize("happened", ["nothing", "stale", "freed", "closed"])
def test_a_foreign_handle_is_foreign_whatever_happened_to_our_own(
    happened: str, make_engine: MakeEngine
) -> None:
    engine, other = make_engine(), make_engine()
    theirs = other.device_snapshot(begun(other, PAST))
    seq = begun(engine, PAST)
    ours = engine.device_snapshot(seq)
    assert dataclasses.replace(theirs, engine=ours.engine) == ours
    match happened:
        case "stale":
            engine.device_snapshot(seq)
        case "freed":
            engine.device_free(ours)
        case "closed":
            engine.close(seq)
    with pytest.raises(HandleRefused) as refused:
        engine.device_restore(theirs)
    assert refused.value.details["reason"] == "foreign"


def test_the_good_handle_stays_good_beside_those_that_are_refused(engine: Engine) -> None:
    seq = begun(engine, PAST)
    old = engine.device_snapshot(seq)
    said(engine, seq, 3)
    new, before = engine.device_snapshot(seq), everything(engine, seq)
    with pytest.raises(HandleRefused):
        engine.device_restore(old, seq)
    with pytest.raises(HandleRefused):
        engine.device_free(old)
    said(engine, seq, 3)
    assert everything(engine, engine.device_restore(new, seq)) == before


def test_a_sequence_that_is_not_live_is_neither_copied_nor_replaced(engine: Engine) -> None:
    seq = begun(engine, PAST)
    handle = engine.device_snapshot(seq)
    with pytest.raises(EngineError, match="no live sequence"):
        engine.device_snapshot(SeqId(3))
    with pytest.raises(EngineError, match="no live sequence"):
        engine.device_restore(handle, SeqId(3))


# --- room -------------------------------------------------------------------------------------------


def test_copies_are_counted_together_and_what_does_not_fit_ends_nothing(make_engine: MakeEngine) -> None:
    size = nbytes(make_engine(), 120)
    engine = make_engine(device_state_bytes=2 * size)
    seq, other, third = begun(engine, PAST), begun(engine, OTHER), begun(engine, PAST[::-1])
    handle, before = engine.device_snapshot(seq), everything(engine, seq)
    small = engine.device_snapshot(other)
    assert (handle.nbytes, small.nbytes) == (size, nbytes(engine, 90))
    with pytest.raises(NoSlot, match="device_state_bytes"):
        engine.device_snapshot(third)
    said(engine, other, 60)
    with pytest.raises(NoSlot):
        engine.device_snapshot(other)
    assert engine.length(engine.device_restore(small, other)) == 90, "the one before stays"
    engine.device_free(small)
    last = engine.device_snapshot(third)
    said(engine, seq, 10)
    assert everything(engine, engine.device_restore(handle, seq)) == before
    engine.close(third)
    said(engine, other, 30)
    assert engine.length(other) == 119
    engine.device_snapshot(other)  # the room of a closed sequence's copy is free
    with pytest.raises(HandleRefused):
        engine.device_free(last)


def nbytes(engine: Engine, length: int) -> int:
    return sum(spec.row_nbytes for spec in engine.layout) * length


def test_a_copy_may_take_the_place_of_its_sequences_old_one(make_engine: MakeEngine) -> None:
    engine = make_engine(device_state_bytes=nbytes(make_engine(), 130))
    seq = begun(engine, PAST)
    for _ in range(10):
        said(engine, seq, 1)
        engine.device_snapshot(seq)
    said(engine, seq, 2)
    with pytest.raises(NoSlot):
        engine.device_snapshot(seq)


def test_what_cannot_fit_is_not_even_copied(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(device_state_bytes=1000)
    seq = begun(engine, PAST)

    def taken(*_: object) -> None:
        raise AssertionError("rows were copied")

    monkeypatch.setattr(engine._memory, "snapshot", taken)
    with pytest.raises(NoSlot):
        engine.device_snapshot(seq)


def test_window_rows_beyond_those_that_are_needed_count_too(
    make_engine: MakeEngine, windowed_path: Path
) -> None:
    least = least_nbytes(make_engine(windowed_path).layout, len(PAST))
    engine = make_engine(windowed_path, device_state_bytes=least)
    seq = begun(engine, PAST)
    with pytest.raises(NoSlot):
        engine.device_snapshot(seq)
    assert engine._device_states.nbytes() == 0


@pytest.mark.parametrize("length", [0, 1, 31, 32, 120])
def test_the_least_that_a_copy_takes_is_what_it_takes(
    length: int, make_engine: MakeEngine, windowed_path: Path
) -> None:
    for engine in (make_engine(), make_engine(windowed_path)):
        seq = begun(engine, PAST[:length])
        taken = engine.device_snapshot(seq).nbytes
        assert least_nbytes(engine.layout, length) <= taken
        assert length > 32 or least_nbytes(engine.layout, length) == taken


def test_without_room_for_any_an_engine_works_as_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(device_state_bytes=0)
    seq = begun(engine, PAST)
    with pytest.raises(NoSlot):
        engine.device_snapshot(seq)
    assert len(said(engine, seq, 3)) == 3
    with pytest.raises(ConfigError, match="device_state_bytes = -1"):
        make_engine(device_state_bytes=-1)


def test_a_copy_that_finds_no_cells_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=200, num_cells=200)
    seq = begun(engine, PAST)
    handle = engine.device_snapshot(seq)
    engine.rewind(seq, 60)
    other = begun(engine, OTHER)
    before = everything(engine, seq), everything(engine, other)
    with pytest.raises(NoSlot):
        engine.device_restore(handle, seq)
    with pytest.raises(NoSlot):
        engine.device_restore(handle)
    assert (everything(engine, seq), everything(engine, other)) == before
    engine.close(other)
    assert engine.length(engine.device_restore(handle, seq)) == 120, "an idle sequence gives way"
    assert engine.known_prefix(OTHER) == 0


def test_a_copy_needs_no_more_cells_than_the_sequence_that_it_replaces(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=130, num_cells=130)
    seq = begun(engine, PAST)
    handle, before = engine.device_snapshot(seq), everything(engine, seq)
    said(engine, seq, 5)
    assert everything(engine, engine.device_restore(handle, seq)) == before
    with pytest.raises(NoSlot):
        engine.device_restore(handle)
    begun(engine, [])  # the slot of what was refused is free


def test_a_device_without_memory_is_no_room(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seq = begun(engine, PAST)
    handle, before = engine.device_snapshot(seq), everything(engine, seq)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine._memory, "snapshot", full)
        with pytest.raises(NoSlot, match="device has no memory"):
            engine.device_snapshot(seq)
    with monkeypatch.context() as patched:
        patched.setattr(type(engine._memory._parts.stored[-1].buffer), "write_bytes", full)
        with pytest.raises(NoSlot, match="device has no memory"):
            engine.device_restore(handle)
    assert everything(engine, engine.device_restore(handle, seq)) == before
    assert len(engine._slots._live) == 1


# --- leaks ------------------------------------------------------------------------------------------


def live_bytes() -> int:
    """Bytes of all tensors that python knows of."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.layout is torch.strided
    }
    return sum(storages.values())


@pytest.mark.parametrize("windowed", [False, True])
def test_a_thousand_copies_leak_nothing(
    windowed: bool, make_engine: MakeEngine, tiny_path: Path, windowed_path: Path
) -> None:
    """Bytes of tensors are the same to the last one, and the process has grown by less than a tenth of what
    the copies took."""
    engine = make_engine(windowed_path if windowed else tiny_path, type_k="f32", type_v="f32")
    seq = begun(engine, PAST)

    def copies(count: int) -> int:
        taken = 0
        for number in range(count):
            handle = engine.device_snapshot(seq)
            taken += handle.nbytes
            match number % 4:
                case 0:
                    engine.device_restore(handle, seq)
                case 1:
                    engine.device_free(handle)
                case 2:
                    other = engine.device_restore(handle)
                    engine.device_snapshot(other)
                    engine.close(other)
                case _:
                    with pytest.raises(HandleRefused):
                        engine.device_free(dataclasses.replace(handle, generation=handle.generation - 1))
        engine.device_free(engine.device_snapshot(seq))
        return taken

    copies(20)
    before, resident = live_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = copies(1000)
    assert live_bytes() == before
    assert engine._device_states.nbytes() == 0
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    assert taken > 100e6
    assert grown < taken / 10
    states = engine._device_states
    assert max(len(states._kept), len(states._newest), len(states._ended)) <= engine.config.num_seqs + 1


# --- the draft --------------------------------------------------------------------------------------


class Memo:
    """A drafter that keeps what it was told, and guesses nothing."""

    name, wants_hidden = "memo", False

    def __init__(self) -> None:
        self.told: dict[SeqId, list[int]] = {}
        self.broken = False

    @property
    def fingerprint(self) -> Fingerprint | None:
        return Fingerprint({"memo": 1})

    def observe(self, seq: SeqId, start: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.told[seq] = [*self.told.get(seq, [])[:start], *tokens]

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        return ()

    def cut(self, seq: SeqId, length: int) -> None:
        self.told[seq] = self.told.get(seq, [])[:length]

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        self.told[target] = self.told.get(source, [])[:length]

    def snapshot(self, seq: SeqId, tokens: Sequence[int], since: int = 0) -> DraftState | None:
        assert self.fingerprint is not None
        return DraftState(self.fingerprint, (), len(tokens), (), ())

    def restore(self, seq: SeqId, tokens: Sequence[int], state: DraftState) -> None:
        if self.broken:
            raise NoSlot("no room")
        self.told[seq] = list(tokens[: state.length])


def test_a_draft_comes_back_with_its_sequence_and_keeps_nobody_from_coming_back(engine: Engine) -> None:
    drafter = Memo()
    engine.speculate(drafter, 2)
    seq = begun(engine, PAST)
    handle, before = engine.device_snapshot(seq), everything(engine, seq)
    said(engine, seq, 4)
    engine.device_restore(handle, seq)
    assert drafter.told[seq] == PAST
    said(engine, seq, 4)
    drafter.broken = True
    assert everything(engine, engine.device_restore(handle, seq)) == before
    assert drafter.told[seq] == [], "it begins anew"


def test_an_edge_of_logits_is_an_edge_of_logits_again(engine: Engine) -> None:
    seq = begun(engine, PAST)
    handle = engine.device_snapshot(seq)
    said(engine, seq, 1)
    assert isinstance(engine.edge(engine.device_restore(handle, seq)), NextLogits)

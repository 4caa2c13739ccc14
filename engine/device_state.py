"""Device states: copies of sequences that stay on the device, to go back to without a way through the host.

Each sequence has one at most, and a new one ends the old one. A handle stands for it, and is good for nothing
else: it is told from every other handle that there was, however often ids of sequences are used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from engine.core import Core
from engine.errors import EngineError, HandleRefused, NoSlot, StateError
from engine.sequence import Record
from engine.state import Layout, PartKind, SeqId, SequenceState

#: Why a handle is good no more: a newer copy of its sequence was made, it was freed, its sequence is gone, or
#: it never was this engine's.
Refusal = Literal["stale", "freed", "removed", "foreign"]


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A handle: it stands for the copy of a sequence as it was at `length` tokens. Rows and point state of
    that take `nbytes` of the device. `engine` is a mark that is equal to no other engine's."""

    engine: object
    seq: SeqId
    generation: int
    length: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What a handle stands for: the whole state, rows where they were made, and the float32 [n, vocab] logits
    after the `recent` tokens, where they were known."""

    handle: DeviceState
    state: SequenceState
    recent: torch.Tensor | None
    scope: str = ""


class DeviceStates:
    """The copies of one engine, `budget` bytes in all. What it remembers of handles does not grow with how
    many there were."""

    def __init__(self, budget: int) -> None:
        self._mark = object()
        self._budget = budget
        self._generation = 0
        self._kept: dict[SeqId, Kept] = {}
        #: by id of a sequence, the generation of the newest copy, freed or not
        self._newest: dict[SeqId, int] = {}
        #: by id of a sequence, the generation of the last copy of any made before that id was given up
        self._ended: dict[SeqId, int] = {}

    def nbytes(self) -> int:
        return sum(kept.handle.nbytes for kept in self._kept.values())

    def check_room(self, seq: SeqId, nbytes: int) -> None:
        """Raises NoSlot unless a copy of `nbytes` would fit in place of the sequence's old one."""
        taken = sum(kept.handle.nbytes for other, kept in self._kept.items() if other != seq)
        if nbytes > self._budget - taken:
            raise NoSlot(
                f"no room for a device state of {nbytes:,} bytes: others take {taken:,} of the "
                f"{self._budget:,} of device_state_bytes"
            )

    def keep(
        self, seq: SeqId, state: SequenceState, recent: torch.Tensor | None, scope: str = ""
    ) -> DeviceState:
        """Keep `state` in place of the sequence's old one. Raises NoSlot, and then the old one stays."""
        nbytes = _nbytes(state)
        self.check_room(seq, nbytes)
        self._generation += 1
        handle = DeviceState(self._mark, seq, self._generation, state.length, nbytes)
        self._kept[seq] = Kept(handle, state, recent, scope)
        self._newest[seq] = handle.generation
        return handle

    def find(self, handle: DeviceState) -> Kept:
        """Raises HandleRefused; `details["reason"]` is a `Refusal`."""
        if handle.engine is not self._mark:
            raise _refused("foreign", "the device state is another engine's")
        newest, ended = self._newest.get(handle.seq, 0), self._ended.get(handle.seq, 0)
        if handle.generation <= ended:
            raise _refused("removed", f"sequence {handle.seq} is closed, and its device state with it")
        if handle.generation < newest:
            raise _refused("stale", f"sequence {handle.seq} has had a newer device state since")
        kept = self._kept.get(handle.seq)
        if kept is None and handle.generation == newest:
            raise _refused("freed", f"the device state of sequence {handle.seq} was freed")
        if kept is None or kept.handle != handle:
            raise _refused("foreign", f"there never was such a device state of sequence {handle.seq}")
        return kept

    def free(self, handle: DeviceState) -> None:
        """Raises HandleRefused."""
        del self._kept[self.find(handle).handle.seq]

    def end(self, seq: SeqId) -> None:
        """The sequence is given up; whoever has its id next knows nothing of it."""
        self._kept.pop(seq, None)
        self._ended[seq] = self._generation


def device_snapshot(
    core: Core, states: DeviceStates, seq: SeqId, take: Callable[[], SequenceState]
) -> DeviceState:
    """See `Engine.device_snapshot`; `take` snapshots the sequence."""
    record = core.record(seq)
    states.check_room(seq, least_nbytes(core.memory.layout, len(record.tokens)))
    with _memory_of_device():
        state = take()
    return states.keep(seq, state, record.recent, record.scope)


def device_restore(core: Core, states: DeviceStates, handle: DeviceState, seq: SeqId | None) -> SeqId:
    """See `Engine.device_restore`."""
    kept = states.find(handle)
    if seq is not None:
        core.record(seq)
        _land(core, seq, kept)
        return seq
    new = core.slots.open(kept.state.sampler)
    try:
        _land(core, new, kept)
    except BaseException:
        core.slots.discard(new)
        raise
    return new


def _land(core: Core, seq: SeqId, kept: Kept) -> None:
    """Put what is kept in place of what the live sequence has. After an error the sequence is as it was."""
    state = kept.state
    with _memory_of_device():
        core.slots.with_room(lambda: core.memory.replace(seq, state.tokens, state.rows, state.points))
    record = Record.of(state, kept.scope)
    record.recent = kept.recent
    core.slots.replace(seq, record)
    if core.drafter is not None:
        core.drafter.cut(seq, 0)
        if state.draft is not None:
            # Another drafter may be in use by now, or its memory full: then it begins anew, and what is said
            # is the same.
            with contextlib.suppress(EngineError, StateError):
                core.drafter.restore(seq, state.tokens, state.draft)


def least_nbytes(layout: Layout, length: int) -> int:
    """Bytes that a state of `length` tokens has at least, told before anything is copied: it can have more
    window rows than it needs, and checkpoints."""
    total = 0
    for spec in layout:
        match spec.kind:
            case PartKind.POINT:
                rows = 1 if length else 0
            case PartKind.WINDOW:
                rows = min(length, spec.window or 0)
            case PartKind.TOKEN | PartKind.BLOCK:
                rows = spec.num_rows(0, length)
        total += rows * spec.row_nbytes
    return total


def _nbytes(state: SequenceState) -> int:
    halves = (state,) if state.draft is None else (state, state.draft)
    rows = sum(rows.nbytes for half in halves for rows in half.rows)
    return rows + sum(part.numel() for half in halves for point in half.points for part in point.parts)


@contextlib.contextmanager
def _memory_of_device() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoSlot("the device has no memory left for the copy of a sequence") from error


def _refused(reason: Refusal, message: str) -> HandleRefused:
    return HandleRefused(message, reason=reason)

"""The way back to where a turn began, for models that lose rows while a reply is said."""

from __future__ import annotations

import contextlib

from engine.device_state import DeviceState
from engine.errors import HandleRefused, NoSlot
from engine.state import SeqId
from engine.verbs import Verbs


class TurnStart:
    """A copy of a conversation's sequence on its own device, made when the turn began; none where memory can
    be cut back anyway, or where copies have no room.

    While it is held, the sequence still begins with the very rows that were copied: who cuts it further back
    tells so.
    """

    def __init__(self, engine: Verbs) -> None:
        self._engine = engine
        self._handle: DeviceState | None = None

    @property
    def length(self) -> int:
        """How many tokens the copy has; 0 without one."""
        return 0 if self._handle is None else self._handle.length

    def keep(self, seq: SeqId) -> None:
        """The turn begins here."""
        length = self._engine.length(seq)
        if self.length == length:
            return
        self.forget()
        if length and self._engine.drops_rows:
            with contextlib.suppress(NoSlot):  # then the store is the way back, or reading again
                self._handle = self._engine.device_snapshot(seq)

    def go_back(self, seq: SeqId) -> bool:
        """Whether the sequence is now what it was when the turn began, its sampler apart."""
        if self._handle is None:
            return False
        sampler = self._engine.sampler(seq)
        try:
            self._engine.device_restore(self._handle, seq)
        except NoSlot:
            return False
        self._engine.set_sampler(seq, sampler)
        return True

    def cut(self, length: int) -> None:
        """Only the first `length` rows are what they were."""
        if length < self.length:
            self.forget()

    def forget(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(HandleRefused):  # with its sequence it is gone already
                self._engine.device_free(self._handle)
        self._handle = None

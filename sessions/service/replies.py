"""The replies to one prompt, said in the same batches."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from engine.best_of import seed_of
from engine.generation import Cancel
from engine.reply import Finish, Piece
from engine.scheduler import Options
from engine.shared import SharedEngine
from engine.state import SeqId
from sessions.live import Live
from sessions.service.ask import Ask
from sessions.service.choosers import Choosers
from sessions.service.told import Said, Spoken


class Replies:
    """Says them. The first is the conversation's own; the others are of forks, which end with it.

    `spoken` is what was read so far: after the end, and after an early one.
    """

    def __init__(
        self, engine: SharedEngine, live: Live, ask: Ask, choosers: Choosers, cancel: Cancel
    ) -> None:
        self._engine = engine
        self._live = live
        self._ask = ask
        self._choosers = choosers
        self._cancel = cancel
        self._growing = [_Growing() for _ in range(ask.num_replies)]

    @property
    def spoken(self) -> tuple[Spoken, ...]:
        return tuple(each.spoken() for each in self._growing)

    def said(self) -> Generator[Said, None, None]:
        """Pieces as they come. Raises NoSlot where there is no room for so many, EngineError."""
        aside: list[SeqId] = []
        try:
            for index in range(1, self._ask.num_replies):
                aside.append(self._fork(index))
            asked = {
                seq: Options(self._ask.max_tokens, self._ask.stop, self._choosers.of(self._ask))
                for seq in (self._live.seq, *aside)
            }
            with closing(self._engine.replies(asked, self._cancel)) as pieces:
                for number, piece in pieces:
                    self._growing[number].add(piece)
                    if number == 0:
                        self._live.told += piece.token is not None
                    yield Said(number, piece)
        finally:
            for seq in aside:
                self._engine.forget(seq)

    def _fork(self, index: int) -> SeqId:
        seq = self._engine.fork(self._live.seq)
        sampler = self._engine.sampler(seq)
        self._engine.set_sampler(seq, replace(sampler, seed=seed_of(sampler.seed, index)))
        return seq


class _Growing:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_tokens = 0
        self._finish: Finish = "cancelled"  # until it says how it ended

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._num_tokens += piece.token is not None
        self._finish = piece.finish or self._finish

    def spoken(self) -> Spoken:
        return Spoken("".join(self._texts), self._finish, self._num_tokens)

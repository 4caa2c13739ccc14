"""`Answer`: what a conversation of the Python API says next, heard by a loop of either kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from engine.reply import Finish
from sessions.restore import RestoreResult
from sessions.service.told import Begun, Ended, Said, Told

Result = TypeVar("Result")

#: A turn that has not begun, given what to ask whether it should end.
Begin = Callable[[Callable[[], bool]], Generator[Told, None, None]]


class Answer:
    """The text of one reply, piece by piece: `for piece in answer`, or `async for`. Nothing happens before
    the first one is asked for. What is heard raises is what `Backend.turn` raises.

    Who stops listening calls `close` or `aclose` (the end of the session's block does it too): then what was
    heard by then is what was said, and that is saved.
    """

    def __init__(self, begin: Begin) -> None:
        self._gone = threading.Event()
        self._heard = threading.Lock()
        self._told = begin(self._gone.is_set)
        self._texts: list[str] = []
        self._over = False
        self._thread: ThreadPoolExecutor | None = None
        self.begun: Begun | None = None
        self.ended: Ended | None = None

    @property
    def restored(self) -> RestoreResult | None:
        """What of the past was not read again, and why; None before the first piece was asked for."""
        return None if self.begun is None else self.begun.restored

    @property
    def text(self) -> str:
        """What was heard so far."""
        return "".join(self._texts)

    @property
    def finish(self) -> Finish | None:
        """Why it ended; None before the end."""
        return None if self.ended is None else self.ended.replies[0].finish

    # --- in a thread --------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        piece = self._next()
        if piece is None:
            raise StopIteration
        return piece

    def read(self) -> str:
        """All of it, to its end."""
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """Hear no more of it. Returns when what was heard is saved. Does nothing to one that is at its
        end."""
        self._gone.set()
        with self._heard:  # whoever waits for a piece just now has it first
            self._end()
            self._told.close()

    # --- in an event loop ---------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        try:
            piece = None if self._over else await self._in_thread(self._next)
        except asyncio.CancelledError:
            self._gone.set()  # its thread does not wait for more than a token
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aread(self) -> str:
        """All of it, to its end."""
        async for _ in self:
            pass
        return self.text

    async def aclose(self) -> None:
        """See `close`."""
        self._gone.set()
        await asyncio.to_thread(self.close)

    # --- inside -------------------------------------------------------------------------------

    def _next(self) -> str | None:
        """The next piece that has any text; None at the end."""
        with self._heard:
            try:
                while not self._over:
                    match next(self._told, None):
                        case Begun() as begun:
                            self.begun = begun
                        case Said(0, piece):
                            if piece.text:
                                self._texts.append(piece.text)
                                return piece.text
                        case Ended() as ended:
                            self.ended = ended
                        case None:
                            self._end()
            except BaseException:
                self._end()
                raise
        return None

    def _end(self) -> None:
        """Nothing more is to come, and nobody waits for it."""
        self._over = True
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def _in_thread(self, verb: Callable[[], Result]) -> Result:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "answer")
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)

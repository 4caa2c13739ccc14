"""A turn that runs in a thread of its own, told to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
from starlette.types import Receive

from sessions.service.threads import Threads
from sessions.service.told import Begun, Ended, Told

Cancel = Callable[[], bool]
#: A turn of the backend that has not begun, given what to ask whether it should end (`Ask.cancel`).
Begin = Callable[[Cancel], Iterator[Told]]


class Turn:
    """Read by one task: first `begun`, then `events`. A client that goes away ends the reply at once: what
    was read of it is saved, and `events` goes on to the end of that.

    What is told waits here without a bound of its own: a context's worth at most, and a client that reads
    slowly keeps no one from the engine.
    """

    def __init__(self, threads: Threads, begin: Begin, receive: Receive) -> None:
        """Starts the turn. `receive` is the request's, whose body was read."""
        self._begin = begin
        self._gone = threading.Event()
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._send, self._events = anyio.create_memory_object_stream[Told](math.inf)
        self._watching = self._loop.create_task(self._watch(receive))
        threads.start(self._run)

    @property
    def gone(self) -> bool:
        """Whether the client went away, or `cancel` was called."""
        return self._gone.is_set()

    def cancel(self) -> None:
        self._gone.set()

    def leave(self) -> None:
        """Hear no more of it. It goes on to its end, unless it is cancelled."""
        self._events.close()
        self._watching.cancel()

    async def begun(self) -> Begun:
        """Wait until the prompt was read. Raises what the backend raised instead."""
        async for told in self.events():
            assert isinstance(told, Begun), told
            return told
        raise AssertionError("a turn that neither began nor failed")

    async def ended(self) -> Ended:
        """Wait for the end, after `begun`. Raises what the backend raised instead."""
        ended: Ended | None = None
        async for told in self.events():
            if isinstance(told, Ended):
                ended = told
        assert ended is not None, "a turn without an end"
        return ended

    async def events(self, silence: float = math.inf) -> AsyncIterator[Told | None]:
        """What is told from now on; None after each `silence` seconds without anything. Raises what the
        backend raised."""
        while True:
            told = None
            try:
                with anyio.move_on_after(silence):
                    told = await self._events.receive()
            except anyio.EndOfStream:
                break
            yield told
        self.leave()
        if self._error is not None:
            raise self._error

    # --- the turn's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for told in self._begin(self._gone.is_set):
                self._tell(self._put, told)
        except BaseException as error:  # told to whom asked, in `events`
            self._error = error
        self._tell(self._send.close)

    def _tell(self, what: Callable[..., None], *args: Told) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody to tell
            self._loop.call_soon_threadsafe(what, *args)

    def _put(self, told: Told) -> None:
        with contextlib.suppress(anyio.BrokenResourceError):  # nobody hears it any more
            self._send.send_nowait(told)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()

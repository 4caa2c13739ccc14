"""From a thread that writes to the event loop that sends, a bounded piece at a time."""

from __future__ import annotations

import asyncio
import contextlib

import anyio

_PIECE = 1 << 20


class Pipe:
    """`write` and `end` are a thread's, `read` and `leave` the loop's. The writer waits until what it wrote
    is taken, and gets BrokenPipeError once nobody reads any more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._in, self._out = anyio.create_memory_object_stream[bytes](1)
        self._gathered = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._gathered += data
        if len(self._gathered) >= _PIECE:
            self._pass_on()
        return len(data)

    def end(self) -> None:
        """Nothing more is written, nor was what is gathered yet if it failed."""
        with contextlib.suppress(BrokenPipeError):
            self._pass_on()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._in.close)

    async def read(self) -> bytes:
        """The next piece; none after the last."""
        try:
            return await self._out.receive()
        except anyio.EndOfStream:
            return b""

    def leave(self) -> None:
        self._out.close()

    def _pass_on(self) -> None:
        piece = bytes(self._gathered)
        self._gathered.clear()
        if piece:
            try:
                asyncio.run_coroutine_threadsafe(self._in.send(piece), self._loop).result()
            except (anyio.BrokenResourceError, RuntimeError):
                raise BrokenPipeError("nobody reads the archive any more") from None

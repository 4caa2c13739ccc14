"""What comes of requests, on its way from the thread that computes to the one that reads."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from engine.generation import Cancel
from engine.reply import Piece
from engine.scheduler import Read, RequestId
from engine.state import SeqId

#: Pieces that a reader may be behind: then its request waits, so that little is said in vain, and the queue
#: of one who never reads stays small.
RUN_AHEAD = 16

#: How far the prompt is, a piece, or the error that ended it.
Item = Read | Piece | BaseException

#: Several requests of one reader may have one queue: an item comes with its stream's number.
Items = queue.SimpleQueue[tuple[int, Item]]


@dataclass(eq=False, slots=True)
class Stream:
    """One request as both threads see it.

    The driver alone counts what it `put`, and the tokens that are `sampled`; it sets `over` before the last
    item, and `held` while the reader is too far behind. The reader alone counts what it `took`, and the
    tokens that it `heard`.
    """

    seq: SeqId
    request: RequestId
    cancel: Cancel | None
    items: Items
    number: int = 0
    put: int = 0
    sampled: int = 0
    took: int = 0
    heard: int = 0
    over: bool = False
    held: bool = False

    def add(self, item: Item) -> None:
        """In the driver's thread."""
        self.put += 1
        self.sampled += isinstance(item, Piece) and item.token is not None
        self.items.put((self.number, item))

    def take(self, item: Item) -> None:
        """In the reader's thread: `item` of this stream was got from the queue."""
        self.took += 1
        self.heard += isinstance(item, Piece) and item.token is not None

    @property
    def behind(self) -> bool:
        """Whether the reader is so far behind that the request has to wait."""
        return self.put - self.took >= RUN_AHEAD

    @property
    def caught_up(self) -> bool:
        """Whether one that waits may go on."""
        return self.put - self.took <= RUN_AHEAD // 2

    @property
    def done(self) -> bool:
        """Whether it is over and was read to its end."""
        return self.over and self.put == self.took

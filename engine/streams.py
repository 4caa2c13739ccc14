"""What comes of a request, on its way from the thread that computes to the one that reads."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

from engine.generation import Cancel
from engine.reply import Piece
from engine.scheduler import Read, RequestId
from engine.state import SeqId

#: Sampled tokens that a reader may be behind: then its request waits, so that little is said in vain, and the
#: queue of one who never reads stays small.
RUN_AHEAD = 16

#: What is in a queue: how far the prompt is, a piece, or the error that ended it.
Item = Read | Piece | BaseException


@dataclass(eq=False, slots=True)
class Stream:
    """One request as both threads see it. `unread` tokens are in the queue; only the driver adds to them.

    The driver sets `over` with the last item, and `held` while the reader is too far behind.
    """

    seq: SeqId
    request: RequestId
    cancel: Cancel | None
    items: queue.SimpleQueue[Item] = field(default_factory=queue.SimpleQueue)
    over: bool = False
    held: bool = False

    @property
    def behind(self) -> bool:
        """Whether the reader is so far behind that the request has to wait."""
        return self.items.qsize() >= RUN_AHEAD

    @property
    def caught_up(self) -> bool:
        """Whether one that waits may go on."""
        return self.items.qsize() <= RUN_AHEAD // 2

    def take_back(self) -> int:
        """Empty the queue. Returns how many tokens nobody read."""
        count = 0
        while True:
            try:
                item = self.items.get_nowait()
            except queue.Empty:
                return count
            count += isinstance(item, Piece) and item.token is not None

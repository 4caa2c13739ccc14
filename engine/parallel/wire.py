"""What rank 0 has to say, kept until something waits for an answer."""

from __future__ import annotations

from engine.parallel.group import Group
from engine.parallel.messages import Message, encode


class Wire:
    """Words to the other ranks, in order. So a step of decoding is one message, not one for each word."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._said: list[Message] = []

    def tell(self, message: Message) -> None:
        """It goes out with the next `flush`."""
        self._said.append(message)

    def flush(self) -> None:
        """Raises RankLost."""
        said, self._said = self._said, []
        self.group.tell(encode(said))

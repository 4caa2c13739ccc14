"""Which replies of a session may be asked for again, and by what key (docs/format.md, section 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import Corrupt
from serialization.limits import MAX_ENTRIES, MAX_INTEGER, MAX_LABEL_NBYTES, MAX_REPLIES, refuse_above
from serialization.records import exactly, integer, items, text

#: the feature that a manifest with such replies needs
REPLIES = "replies"
DIGEST_NBYTES = 16


@dataclass(frozen=True, slots=True)
class KeptReply:
    """Message number `message` was said in turn `generation`, and ended by `finish`: the answer to a request
    that was made under `key`. Both that and `request` are digests of 16 bytes."""

    key: bytes
    request: bytes
    generation: int
    message: int
    finish: str

    def record(self) -> object:
        return [self.key, self.request, self.generation, self.message, self.finish]

    @staticmethod
    def read(value: Any) -> KeptReply:
        key, request, generation, message, finish = exactly(value, 5, "reply")
        return KeptReply(
            _digest(key),
            _digest(request),
            integer(generation, MAX_INTEGER, "reply"),
            integer(message, MAX_ENTRIES, "reply"),
            text(finish, MAX_LABEL_NBYTES, "reply"),
        )


def read_replies(value: Any, num_messages: int) -> tuple[KeptReply, ...]:
    """Raises Corrupt unless they are of messages that there are, rising, each key once; none is no list."""
    replies = tuple(KeptReply.read(item) for item in items(value, MAX_REPLIES, "replies"))
    places = [reply.message for reply in replies]
    if places != sorted(set(places)) or any(place >= num_messages for place in places):
        raise Corrupt("replies: not of messages that there are, one behind the other")
    if not replies or len({reply.key for reply in replies}) < len(replies):
        raise Corrupt("replies: none, or two of one key")
    return replies


def replies_before(replies: Sequence[KeptReply], index: int) -> tuple[KeptReply, ...]:
    """Those that are no message from number `index` on."""
    return tuple(reply for reply in replies if reply.message < index)


def with_reply(replies: Sequence[KeptReply], reply: KeptReply) -> tuple[KeptReply, ...]:
    """With `reply` as the last one; the oldest are forgotten beyond the limit."""
    others = [other for other in replies_before(replies, reply.message) if other.key != reply.key]
    return (*others, reply)[-MAX_REPLIES:]


def _digest(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise Corrupt("reply: a key is a byte string")
    refuse_above("reply: a key, in bytes", len(value), DIGEST_NBYTES)
    if len(value) < DIGEST_NBYTES:
        raise Corrupt(f"reply: a key of {len(value)} bytes")
    return value

"""A turn that is said once, however often it is asked for."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from blake3 import blake3

from engine.errors import IdempotencyKeyReused
from engine.reply import Finish, Piece
from serialization.manifest import Message
from serialization.replies import DIGEST_NBYTES, KeptReply, with_reply
from sessions.restore import Reason, RestoreResult
from sessions.service.told import Begun, Said, Spoken, Told
from sessions.session import Session

_KEY, _REQUEST = "tenuto idempotency key, version 1", "tenuto idempotent request, version 1"
_FINISHES: dict[str, Finish] = {
    finish: finish for finish in ("eos", "stop", "length", "context", "cancelled")
}


@dataclass(frozen=True, slots=True)
class Once:
    """What its asker calls a turn, and what is asked for: digests of both, kept with the turn. The last 16
    turns of a session that had one are known by it; a fork knows none."""

    key: bytes
    request: bytes

    @classmethod
    def of(cls, key: str, request: bytes) -> Once:
        return cls(_digest(_KEY, key.encode()), _digest(_REQUEST, request))

    def kept_in(self, session: Session) -> KeptReply | None:
        """The reply that was said already. Raises IdempotencyKeyReused where something else was asked."""
        for reply in session.replies:
            if reply.key == self.key:
                if reply.request != self.request:
                    raise IdempotencyKeyReused("another request was made under this idempotency key before")
                return reply
        return None

    def keep_in(self, session: Session, message: int, finish: Finish) -> None:
        """Message number `message` is the reply, and is about to be committed."""
        reply = KeptReply(self.key, self.request, session.generation + 1, message, finish)
        session.replies = with_reply(session.replies, reply)


def is_whole(reply: KeptReply, num_messages: int) -> bool:
    """Whether it can only be told again. A reply whose asker went away is said anew, while it is the last."""
    return reply.finish != "cancelled" or reply.message < num_messages - 1


def told_again(session: str, message: Message, reply: KeptReply) -> Generator[Told, None, Spoken]:
    """The beginning and the text of a reply that was said before; it returns what `Ended` has of it."""
    finish = _FINISHES.get(reply.finish, "stop")
    detail = f"said before, in turn {reply.generation}"
    yield Begun(session, message.start, RestoreResult(Reason.REPEATED, message.start, 0, 0.0, detail))
    yield Said(0, Piece(None, message.text, finish))
    return Spoken(message.text, finish, message.stop - message.start)


def _digest(context: str, what: bytes) -> bytes:
    return blake3(what, derive_key_context=context).digest(length=DIGEST_NBYTES)

"""What a client asks of the backend: messages, how to reply to them, and what to keep of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine.state import SamplerParams
from serialization.blobs import BlobId
from sessions.restore import Fallback
from sessions.service.once import Once
from sessions.service.stages import Watch, unwatched
from sessions.service.told import Begun, Spoken


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role` is one that the chat template knows ("system", "user", "assistant")."""

    role: str
    text: str


class Format(StrEnum):
    """What the text of a reply may be."""

    TEXT = "text"
    JSON_OBJECT = "json_object"  # one JSON object, by never choosing a token that could not become one


class Keep(StrEnum):
    """What is stored of a stateless completion."""

    NOTHING = "nothing"  # no byte of it, and no later call finds it in memory
    PAST = "past"  # so much that the next call finds its past; the one that goes on from it replaces it
    SESSION = "session"  # a session of its own, which stays (a response that others may name as parent)


@dataclass(frozen=True, slots=True)
class Own:
    """The session that is kept of a completion by `Keep.SESSION`: `id` is a new session id, made by who asks,
    so that it can be told before the session is there; `note` is asked once all was said, and what it returns
    is stored with the session, in the same commit (`SessionView.note`)."""

    id: str
    note: Callable[[Begun, tuple[Spoken, ...]], str]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to reply.

    max_tokens     of each reply; None: until the model or the context ends it
    stop           texts that end a reply, and are not part of it
    sampler        None: the session's own, or the defaults for a new one. It is the session's from then on
    num_replies    how many replies are said to one prompt, with seeds made from the sampler's (see
                   `best_of.seed_of`); only the first becomes part of a session
    logprobs       with each token its log-probability, and so many of the likeliest in its place; None for
                   neither. Drafts are not used meanwhile
    format         what the text may be
    fallback       what happens to stored rows that cannot be believed
    expected       the turn that the session must stand at (`SessionView.etag`); None: at any
    salt           shares no past, in memory or stored, but with calls of the same tenant and the same salt.
                   A session whose turns are asked with several is its own from then on (see `salts`)
    once           where the session's turn was said already under this key, that is told and nothing is done,
                   whatever is `expected`; of a session's turns alone
    watch          told when a stage of the turn begins and ends
    cancel         asked between batches from another thread: must be quick, and must not raise
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampler: SamplerParams | None = None
    num_replies: int = 1
    logprobs: int | None = None
    format: Format = Format.TEXT
    fallback: Fallback = Fallback.RECOMPUTE
    expected: BlobId | None = None
    salt: str = ""
    once: Once | None = None
    watch: Watch = unwatched
    cancel: Callable[[], bool] | None = None

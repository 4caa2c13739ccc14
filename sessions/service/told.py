"""What the backend tells: a turn as it happens, and sessions as they are."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import TenutoError
from engine.reply import Finish, Piece
from engine.state import SamplerParams
from serialization.blobs import BlobId
from serialization.manifest import Message
from sessions.restore import RestoreResult
from sessions.service.write_back import WriteBackLoad
from sessions.session import SaveResult


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt was read, and the reply begins. The first event of a turn, and the only one of its kind.

    `prompt_tokens` are all ids before the reply: `restored.restored` of them were had from memory or the
    store. Of a session's turn `restored.recomputed` were read again though they had been before, and the rest
    is new; of a stateless call all that were read count as recomputed. `session` is the id of the session
    that the turn is of; None where nothing is kept, and for a stateless call that has no session before its
    end.
    """

    session: str | None
    prompt_tokens: int
    restored: RestoreResult


@dataclass(frozen=True, slots=True)
class Said:
    """The next piece of reply number `reply` (0 to `Ask.num_replies`); one with a `finish` is its last."""

    reply: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Spoken:
    """A whole reply: how it ended, and how many tokens it has."""

    text: str
    finish: Finish
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a turn. `replies` are as many as were asked for.

    `etag` is the session's turn as it is stored now, `saved` what was written for it. Where `save_error` is
    there, the turn is in this process's memory alone: the session goes on here, each next turn (and `save`)
    tries again, and `etag` is still that of the turn before. One that is `pending` is being saved: it has no
    `etag` yet, and is lost if this process is killed before that is done.
    """

    replies: tuple[Spoken, ...]
    session: str | None
    etag: BlobId | None
    saved: SaveResult | None
    save_error: TenutoError | None
    pending: bool = False


#: A turn is Begun, then any number of Said, then Ended. Errors before Begun: the message was not taken.
Told = Begun | Said | Ended


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as it is stored. `etag` names the turn that it stands at (what `expected` compares with);
    `resident` says whether this process has it in memory; `note` is what an API keeps with it, and nothing to
    the backend. Times are seconds since the epoch."""

    id: str
    name: str | None
    title: str
    parent: str | None
    model: str
    generation: int
    etag: BlobId
    created: float
    updated: float
    length: int
    messages: tuple[Message, ...]
    sampler: SamplerParams
    resident: bool
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some sessions, the newest first; `after` is what to ask for to get those that follow, None where there
    are none."""

    sessions: tuple[SessionView, ...]
    after: str | None


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model that the backend runs. `n_ctx` tokens a session may have, `num_seqs` at once; `template` is
    the text of its chat template."""

    name: str
    n_ctx: int
    num_seqs: int
    num_cells: int
    vocab_size: int
    template: str | None
    weights: str


@dataclass(frozen=True, slots=True)
class Load:
    """What a backend is doing now: turns that run and that wait for their turn to run, sessions in memory
    that nobody is talking to, turns that could not be saved yet; the moving speeds of prefill and decode,
    tokens/s (None before the first); and batches since it began, with the tokens in them."""

    running: int
    waiting: int
    resident: int
    unsaved: int
    draining: bool
    prefill_speed: float | None
    decode_speed: float | None
    num_batches: int = 0
    num_batch_tokens: int = 0
    write_back: WriteBackLoad | None = None

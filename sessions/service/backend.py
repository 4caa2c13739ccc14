"""`Backend`: conversations of many tenants on one engine, each turn by whoever asks, from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from engine.runner import Engine
from engine.state import SamplerParams
from serialization.blobs import BlobId, Store
from sessions.listing import Usage
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import RestoreResult
from sessions.service.ask import Ask, ChatMessage, Keep, Own
from sessions.service.told import Load, ModelView, Page, SessionView, Told
from sessions.session import ExportInfo, Pin, SaveResult


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """max_turns    turns that run at once, each in the thread that asks for it
    max_waiting  turns that may wait for one of those to end; beyond them Busy is raised
    policy       of every tenant's store
    holder       this process, for those whom a lease keeps out; None: pid and host
    """

    max_turns: int = 64
    max_waiting: int = 256
    policy: Policy = Policy()
    holder: str | None = None


class Backend:
    """Turns, and what there is to do with the sessions that they are of. Every verb is safe from any thread,
    and blocks the one that calls it. A verb sees sessions of its tenant alone.

    A session is named by its id, a unique start of it, or its name. Errors of verbs, all of them TenutoErrors:

    Busy              as many turns run and wait as may (`details["retry_after"]`, seconds)       429
    Draining          the backend is being closed                                                 503
    NoSlot            no room for this now, and nothing idle that could give way                  503
    ContextFull       the conversation has no room for the message                                400
    UsageError        messages that make no turn; NameRefused of names                            400
    TemplateRefused   the chat template refuses these messages; NoChatTemplate: there is none     400
    SessionNotFound   no such session of this tenant (SessionAmbiguous: the start of several)     404
    SessionExists     the name is taken                                                           409
    StaleSession      the session is not at `expected`, or was changed meanwhile                  412
    LeaseHeld         another process (or turn) writes to it (`details`: holder, until, fence)    423
    LeaseLost         it was taken over while the turn ran                                        409
    EditRefused       a rewind that cannot be done exactly                                        409
    StateError        stored bytes that cannot be believed, where `fallback` is REFUSE            409, and of an
                      archive that is imported                                                    400
    StoreUnavailable  StoreFull, IndexDamaged: 503, 507, 500. Of a turn in `Ended.save_error`, since its reply
                      was said; raised only where nothing was
    EngineError       anything else that the model did                                            500
    """

    def __init__(
        self, engine: Engine, open_store: Callable[[str], Store], config: BackendConfig | None = None
    ) -> None:
        """`engine` is the backend's from now on, and is ended with it; `open_store` gives a tenant's store,
        and is asked once for each."""
        raise NotImplementedError

    @property
    def model(self) -> ModelView:
        raise NotImplementedError

    def load(self) -> Load:
        raise NotImplementedError

    # --- turns --------------------------------------------------------------------------------

    def turn(
        self, tenant: str, session: str, messages: Sequence[ChatMessage], ask: Ask | None = None
    ) -> Iterator[Told]:
        """Add `messages` to the session and stream the reply. Nothing is done before the first `next`.

        Closing the iterator early ends the reply: what was read of it is kept and saved, as after `cancel`.
        """
        raise NotImplementedError

    def regenerate(self, tenant: str, session: str, ask: Ask | None = None) -> Iterator[Told]:
        """Say the last reply anew: to the same messages, as the sampler of `ask` says it."""
        raise NotImplementedError

    def edit(self, tenant: str, session: str, text: str, ask: Ask | None = None) -> Iterator[Told]:
        """Put `text` in place of the user's last message, and stream the reply to it."""
        raise NotImplementedError

    def complete(
        self,
        tenant: str,
        messages: Sequence[ChatMessage],
        ask: Ask | None = None,
        keep: Keep = Keep.PAST,
        parent: str | None = None,
        own: Own | None = None,
    ) -> Iterator[Told]:
        """Reply to a whole conversation, of which the longest known past is not read again. With `parent` that
        is looked for in the session of this name alone, which stays as it is. With `own` the session that
        `Keep.SESSION` keeps is that one."""
        raise NotImplementedError

    # --- sessions -----------------------------------------------------------------------------

    def create(
        self,
        tenant: str,
        name: str | None = None,
        system: str | None = None,
        sampler: SamplerParams | None = None,
        title: str = "",
        note: str | None = None,
    ) -> SessionView:
        """A new session, stored, without turns. `note`: see `amend`."""
        raise NotImplementedError

    def get(self, tenant: str, session: str) -> SessionView:
        raise NotImplementedError

    def list(self, tenant: str, limit: int = 20, after: str | None = None, containing: str = "") -> Page:
        """At most `limit` sessions (1 to 100), those begun last first; with `containing` those whose name or
        title has that text."""
        raise NotImplementedError

    def fork(self, tenant: str, session: str, name: str | None = None, turns_back: int = 0) -> SessionView:
        """A new session with the same past, but for its last `turns_back` turns."""
        raise NotImplementedError

    def rewind(
        self, tenant: str, session: str, turns: int = 1, expected: BlobId | None = None
    ) -> tuple[SessionView, RestoreResult]:
        """Take back the last turns."""
        raise NotImplementedError

    def rename(
        self, tenant: str, session: str, name: str | None, expected: BlobId | None = None
    ) -> SessionView:
        raise NotImplementedError

    def amend(
        self,
        tenant: str,
        session: str,
        messages: Sequence[ChatMessage],
        note: str | None,
        expected: BlobId | None = None,
    ) -> SessionView:
        """Let the session's messages be these, without a reply: those that it has and are the same stay as they
        were fed, and the others are read with its next turn. `note` is kept beside them (at most 1 MiB)."""
        raise NotImplementedError

    def save(self, tenant: str, session: str) -> tuple[SessionView, SaveResult | None]:
        """Store a turn that could not be saved; None where all is stored already."""
        raise NotImplementedError

    def delete(self, tenant: str, session: str, expected: BlobId | None = None) -> None:
        raise NotImplementedError

    def export(self, tenant: str, session: str, out: BinaryIO) -> ExportInfo:
        """Write the session, as it is stored or (a turn that could not be saved) in memory, as one archive."""
        raise NotImplementedError

    def import_(self, tenant: str, source: BinaryIO, name: str | None = None) -> SessionView:
        """A new session from an archive."""
        raise NotImplementedError

    def pin(self, tenant: str, session: str, name: str) -> Pin:
        """Keep the session's newest turn under `name`."""
        raise NotImplementedError

    def pins(self, tenant: str) -> Sequence[Pin]:
        raise NotImplementedError

    def load_pin(self, tenant: str, name: str) -> SessionView:
        """A new session that goes on from a pin."""
        raise NotImplementedError

    def unpin(self, tenant: str, name: str) -> None:
        raise NotImplementedError

    def usage(self, tenant: str) -> Usage:
        raise NotImplementedError

    def manager(self, tenant: str) -> SessionManager:
        """The tenant's stored sessions, for what is done to all of them: check, gc, list with sizes."""
        raise NotImplementedError

    # --- words --------------------------------------------------------------------------------

    def tokenize(self, text: str, special: bool = False) -> tuple[int, ...]:
        """The ids of a text; with `special` control tokens that are written in it are themselves."""
        raise NotImplementedError

    def detokenize(self, ids: Sequence[int]) -> str:
        """Raises UsageError for an id that is none."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        raise NotImplementedError

    def count(self, messages: Sequence[ChatMessage]) -> int:
        """How many tokens a prompt of these messages has."""
        raise NotImplementedError

    # --- the end ------------------------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Take no more turns (Draining); let those that run end by themselves for so long, then end their
        replies, and wait until each is saved. Then nothing is held: leases are given back."""
        raise NotImplementedError

    def close(self) -> None:
        """Drain at once, and end the engine."""
        raise NotImplementedError

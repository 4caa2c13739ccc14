"""`Backend`: conversations of many tenants on one engine, each turn by whoever asks, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from engine.driver import Driver
from engine.errors import NoChatTemplate, TenutoError, UsageError
from engine.runner import Engine
from engine.shared import SharedEngine
from engine.state import SamplerParams
from serialization.blobs import BlobId, Store
from sessions import salts
from sessions.listing import Usage
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.quota import Quota
from sessions.restore import RestoreResult
from sessions.service.admission import Admission, Borrowed
from sessions.service.ask import Ask, ChatMessage, Keep, Own
from sessions.service.choosers import Choosers
from sessions.service.common import Common
from sessions.service.completion import Wanted, complete
from sessions.service.held import save_again, settle, wait_until_stored
from sessions.service.lost import Lost
from sessions.service.past import Past
from sessions.service.place import Place, scope_of
from sessions.service.planner import Planner
from sessions.service.residents import Residents, Unsaved
from sessions.service.saving_again import SavingAgain
from sessions.service.stored import Stored
from sessions.service.told import Load, ModelView, Page, SessionView, Told
from sessions.service.turns import REGENERATE, as_messages, to_edit, to_say, turn
from sessions.service.write_back import Bounds, WriteBack
from sessions.session import ExportInfo, Pin, SaveResult
from sessions.stores.base import check_tenant
from sessions.transcript import align

#: A turn as it happens. To close it early ends the reply.
Turning = Generator[Told, None, None]


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """max_turns    turns that run at once, each in the thread that asks for it, with sequences of the engine
    max_waiting  turns that may wait for one of those to end; beyond them Busy is raised
    policy       what a tenant may keep, and how it is written
    tenants      the policies of tenants that have one of their own
    holder       this process, for those whom a lease keeps out; None: pid and host
    patience     seconds for which a turn waits for another one in its session, before LeaseHeld is raised
    saving_again seconds after which a turn that could not be saved is tried again
    write_back   how much may be saved after its turn has ended; None: each turn is saved before that
    """

    max_turns: int = 64
    max_waiting: int = 256
    policy: Policy = field(default_factory=Policy)
    tenants: Mapping[str, Policy] = field(default_factory=dict)
    holder: str | None = None
    patience: float = 5.0
    saving_again: float = 2.0
    write_back: Bounds | None = None

    def policy_of(self, tenant: str) -> Policy:
        return self.tenants.get(tenant, self.policy)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What this process has of a tenant: its store, and how much may be in it."""

    store: Store
    quota: Quota


class Backend:
    """Turns, and what there is to do with the sessions that they are of. Every verb is safe from any thread,
    and blocks the one that calls it. A verb sees sessions of its tenant alone.

    A session is named by its id, a unique start of it, or its name. Errors of verbs, all of them
    TenutoErrors:

    Busy              as many turns run and wait as may (`details["retry_after"]`, seconds)       429
    Draining          the backend is being closed                                                 503
    NoSlot            no room for this now, and nothing idle that could give way                  503
    ContextFull       the conversation has no room for the message                                400
    UsageError        messages that make no turn; NameRefused of names                            400
    TemplateRefused   the chat template refuses these messages; NoChatTemplate: there is none     400
    SessionNotFound   no such session of this tenant (SessionAmbiguous: the start of several;     404
                      SessionExpired: the store lost it)
    SessionExists     the name is taken                                                           409
    StaleSession      the session is not at `expected`, or was changed meanwhile                  412
    LeaseHeld         another process (or turn) writes to it (`details`: holder, until, fence)    423
                      and did so for as long as a turn waits (`BackendConfig.patience`)
    LeaseLost         it was taken over while the turn ran                                        409
    EditRefused       a rewind that cannot be done exactly                                        409
    TurnLost          the store lost turns that this process knows (`details`: generation, lost)  409
    IdempotencyKeyReused  something else was asked under `Ask.once` before                        409
    StateError        stored bytes that cannot be believed, where `fallback` is REFUSE            409
                      (of an archive that is imported: 400)
    QuotaExceeded     the tenant stores as much as it may                                         507
    StoreUnavailable  StoreFull, IndexDamaged; only where nothing was said: after a reply they    503
                      (and QuotaExceeded) are told in `Ended.save_error`                (507, 500)
    EngineError       anything else that the model did                                            500
    """

    def __init__(
        self, engine: Engine, open_store: Callable[[str], Store], config: BackendConfig | None = None
    ) -> None:
        """`engine` is the backend's from now on, and is ended with it; `open_store` gives a tenant's store,
        and is asked once for each."""
        config = config or BackendConfig()
        self._engine = engine
        self._driver = Driver(engine)
        self._open_store = open_store
        self._config = config
        self._tenants: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._closed = False
        residents, of = Residents(engine.config.num_seqs), engine.config
        bounds = config.write_back
        write_back = None if bounds is None else WriteBack(bounds, of.num_seqs, of.num_cells)
        self._common = Common(
            Admission(
                config.max_turns,
                config.max_waiting,
                of.num_seqs,
                of.num_cells,
                lambda: residents.num_unsaved,
                Borrowed if write_back is None else write_back.held,
            ),
            residents,
            Lost(),
            Planner(),
            Choosers(engine.tokenizer),
            threading.Event(),
            config.patience,
            write_back,
        )
        self._saving_again = SavingAgain(self._common, config.saving_again)

    @property
    def model(self) -> ModelView:
        engine = self._engine
        return ModelView(
            name=engine.model_name,
            n_ctx=engine.n_ctx,
            num_seqs=engine.config.num_seqs,
            num_cells=engine.config.num_cells,
            vocab_size=engine.tokenizer.vocab_size,
            template=engine.template.source if engine.template else None,
            weights=str(engine.fingerprint.meaning.get("weights", "")),
        )

    def load(self) -> Load:
        admission, residents = self._common.admission, self._common.residents
        return Load(
            running=admission.running,
            waiting=admission.waiting,
            resident=len(residents),
            unsaved=residents.num_unsaved,
            draining=admission.draining,
            prefill_speed=self._driver.pace.prefill_speed,
            decode_speed=self._driver.pace.decode_speed,
            num_batches=self._driver.pace.num_batches,
            num_batch_tokens=self._driver.pace.num_tokens,
            write_back=None if self._common.write_back is None else self._common.write_back.load(),
        )

    # --- turns --------------------------------------------------------------------------------

    def turn(
        self, tenant: str, session: str, messages: Sequence[ChatMessage], ask: Ask | None = None
    ) -> Turning:
        """Add `messages` to the session and stream the reply. Nothing is done before the first `next`.

        Closing the iterator early ends the reply: what was read of it is kept and saved, as after `cancel`.
        """
        ask = ask or Ask()
        return turn(self._common, self._place(tenant, ask.salt), session, ask, to_say(messages))

    def regenerate(self, tenant: str, session: str, ask: Ask | None = None) -> Turning:
        """Say the last reply anew: to the same messages, as the sampler of `ask` says it."""
        ask = ask or Ask()
        return turn(self._common, self._place(tenant, ask.salt), session, ask, REGENERATE)

    def edit(self, tenant: str, session: str, text: str, ask: Ask | None = None) -> Turning:
        """Put `text` in place of the user's last message, and stream the reply to it."""
        ask = ask or Ask()
        return turn(self._common, self._place(tenant, ask.salt), session, ask, to_edit(text))

    def complete(
        self,
        tenant: str,
        messages: Sequence[ChatMessage],
        ask: Ask | None = None,
        keep: Keep = Keep.PAST,
        parent: str | None = None,
        own: Own | None = None,
    ) -> Turning:
        """Reply to a whole conversation, of which the longest known past is not read again. With `parent`
        that is looked for in the session of this name alone, which stays as it is. With `own` the session
        that `Keep.SESSION` keeps is that one."""
        ask = ask or Ask()
        place = self._place(tenant, ask.salt)
        past = Past(place)
        wanted = Wanted(as_messages(messages), ask, keep, parent, own)
        return complete(self._common, place, past, wanted)

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
        stored = self._stored(tenant)
        return stored.view(stored.create(name, system, sampler, title, note))

    def get(self, tenant: str, session: str) -> SessionView:
        stored = self._settled(tenant, session)
        return stored.view(stored.entry(session))

    def list(self, tenant: str, limit: int = 20, after: str | None = None, containing: str = "") -> Page:
        """At most `limit` sessions (1 to 100), those begun last first; with `containing` those whose name or
        title has that text. So many are looked at, and no more: a page may have few, and others after it."""
        return self._stored(tenant).list(limit, after, containing)

    def fork(self, tenant: str, session: str, name: str | None = None, turns_back: int = 0) -> SessionView:
        """A new session with the same past, but for its last `turns_back` turns."""
        stored = self._settled(tenant, session)
        self._save(tenant, session)
        return stored.view(stored.fork(session, name, turns_back))

    def rewind(
        self, tenant: str, session: str, turns: int = 1, expected: BlobId | None = None
    ) -> tuple[SessionView, RestoreResult]:
        """Take back the last turns."""
        stored = self._settled(tenant, session)
        self._save(tenant, session)
        entry, result = stored.rewind(session, turns, expected)
        return stored.view(entry), result

    def rename(
        self, tenant: str, session: str, name: str | None, expected: BlobId | None = None
    ) -> SessionView:
        stored = self._settled(tenant, session)
        self._save(tenant, session)
        return stored.view(stored.rename(session, name, expected))

    def amend(
        self,
        tenant: str,
        session: str,
        messages: Sequence[ChatMessage],
        note: str | None,
        expected: BlobId | None = None,
    ) -> SessionView:
        """Let the session's messages be these, without a reply: those that it has and are the same stay as
        they were fed, and the others are read with its next turn. `note` is kept beside them (at most 1
        MiB)."""
        stored = self._settled(tenant, session)
        self._save(tenant, session)
        return stored.view(stored.amend(session, as_messages(messages), note, expected))

    def save(self, tenant: str, session: str) -> tuple[SessionView, SaveResult | None]:
        """Store a turn that could not be saved; None where all is stored already."""
        settle(self._common, self._place(tenant, ""), session)
        stored = self._stored(tenant)
        saved = self._save(tenant, session)
        return stored.view(stored.entry(session)), saved

    def delete(self, tenant: str, session: str, expected: BlobId | None = None) -> None:
        self._settled(tenant, session)
        unsaved = self._take_unsaved(tenant, session)
        if unsaved is None:
            self._stored(tenant).delete(session, expected)
            return
        try:
            unsaved.place.manager.delete_open(unsaved.live.session, expected)
        except BaseException:  # it is there still, and so is what was said in it
            self._common.residents.put_unsaved(unsaved)
            raise
        unsaved.place.engine.forget(unsaved.live.seq)
        unsaved.live.session.close()

    def export(self, tenant: str, session: str, out: BinaryIO) -> ExportInfo:
        """Write the session, as it is stored or (a turn that could not be saved) in memory, as one
        archive."""
        self._settled(tenant, session)
        unsaved = self._take_unsaved(tenant, session)
        if unsaved is None:
            return self.manager(tenant).export(session, out)
        live = unsaved.live
        try:
            return unsaved.place.manager.export_live(live.session, live.seq, live.messages, out)
        finally:
            self._common.residents.put_unsaved(unsaved)

    def import_(self, tenant: str, source: BinaryIO, name: str | None = None) -> SessionView:
        """A new session from an archive."""
        stored = self._stored(tenant)
        return stored.view(self.manager(tenant).take_in(source, name))

    def pin(self, tenant: str, session: str, name: str) -> Pin:
        """Keep the session's newest turn under `name`, in place of what is kept under it until then."""
        self._settled(tenant, session)
        self._save(tenant, session)
        return self.manager(tenant).repin(session, name)

    def load_pin(self, tenant: str, name: str) -> SessionView:
        """A new session that goes on from a pin."""
        stored = self._stored(tenant)
        return stored.view(stored.load(name))

    def usage(self, tenant: str) -> Usage:
        return self.manager(tenant).usage()

    def manager(self, tenant: str) -> SessionManager:
        """The tenant's stored sessions, for what is done to all of them: check, gc, list with sizes."""
        return self._place(tenant, "").manager

    def tenants(self) -> Sequence[str]:
        """Those whom this process knows: who was here, and who has a policy of his own."""
        with self._lock:
            return tuple({*self._tenants, *self._config.tenants})

    @contextmanager
    def managed(self, tenant: str) -> Iterator[SessionManager]:
        """`manager`, without an engine: the store of one who was not here is opened for the block alone."""
        with self._lock:
            was_here = tenant in self._tenants
        if was_here:
            yield self.manager(tenant)
            return
        check_tenant(tenant)
        config = self._config
        with closing(self._open_store(tenant)) as store:
            yield SessionManager(store, None, config.policy_of(tenant), config.holder, tenant)

    # --- words --------------------------------------------------------------------------------

    def tokenize(self, text: str, special: bool = False) -> tuple[int, ...]:
        """The ids of a text; with `special` control tokens that are written in it are themselves."""
        tokenizer = self._engine.tokenizer
        return tuple(tokenizer.encode_special(text) if special else tokenizer.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Raises UsageError for an id that is none."""
        self._check_ids(ids)
        return self._engine.tokenizer.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        self._check_ids((token,))
        return self._engine.tokenizer.token_bytes(token)

    def count(self, messages: Sequence[ChatMessage]) -> int:
        """How many tokens a prompt of these messages has."""
        template, tokenizer = self._engine.template, self._engine.tokenizer
        if template is None:
            raise NoChatTemplate(f"{self._engine.model_name} has no chat template")
        pieces = template.render([{"role": each.role, "content": each.text} for each in messages])
        return len(align((), pieces, tokenizer).ids)

    # --- the end ------------------------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Take no more turns (Draining); let those that run end by themselves for so long, then end their
        replies, and wait until each is saved. Then nothing is held: leases are given back."""
        admission = self._common.admission
        admission.drain()
        if not admission.wait_until_idle(seconds):
            self._common.ending.set()
            admission.wait_until_idle(None)
        if self._common.write_back is not None:
            self._common.write_back.wait()
        self._saving_again.close()
        self._save_all()

    def close(self) -> None:
        """Drain at once, and end the engine."""
        if self._closed:
            return
        self._closed = True
        try:
            self.drain(0.0)
        finally:
            if self._common.write_back is not None:
                self._common.write_back.close()
            self._driver.close()
            self._engine.end()
            for kept in self._tenants.values():
                kept.store.close()

    # --- inside -------------------------------------------------------------------------------

    def _place(self, tenant: str, salt: str) -> Place:
        check_tenant(tenant)
        digest, config, kept = salts.digest_of(tenant, salt), self._config, self._kept(tenant)
        engine = SharedEngine(self._driver, scope_of(tenant, digest))
        manager = SessionManager(
            kept.store, engine, config.policy_of(tenant), config.holder, tenant, digest, kept.quota
        )
        return Place(engine, manager)

    def _kept(self, tenant: str) -> _Kept:
        with self._lock:
            if tenant not in self._tenants:
                store = self._open_store(tenant)
                self._tenants[tenant] = _Kept(store, Quota(store, self._config.policy_of(tenant).quota))
            return self._tenants[tenant]

    def _stored(self, tenant: str) -> Stored:
        return Stored(self._common, self._place(tenant, ""))

    def _settled(self, tenant: str, session: str) -> Stored:
        """The tenant's sessions, once nothing of this one waits to be saved."""
        place = self._place(tenant, "")
        wait_until_stored(self._common, place, session)
        return Stored(self._common, place)

    def _check_ids(self, ids: Sequence[int]) -> None:
        most = self._engine.tokenizer.vocab_size
        for token in ids:
            if not 0 <= token < most:
                raise UsageError(f"{token} is no token: there are {most:,}")

    # --- turns that could not be saved ---------------------------------------------------------

    def _take_unsaved(self, tenant: str, session: str) -> Unsaved | None:
        residents = self._common.residents
        return (
            residents.take_unsaved(tenant, self._stored(tenant).id_of(session))
            if residents.num_unsaved
            else None
        )

    def _save(self, tenant: str, session: str) -> SaveResult | None:
        """Try again, if that is needed. Raises what keeps it from being saved: then it is in memory still."""
        unsaved = self._take_unsaved(tenant, session)
        if unsaved is None:
            return None
        saved, error = save_again(self._common, unsaved)
        if error is not None:
            raise error
        return saved

    def _save_all(self) -> None:
        """Save what is unsaved; what cannot be is lost, and the first reason is raised."""
        errors: list[TenutoError] = []
        for unsaved in self._common.residents.take_all_unsaved():
            _, error = save_again(self._common, unsaved)
            if error is not None:
                errors.append(error)
        for unsaved in self._common.residents.take_all_unsaved():
            unsaved.place.engine.close(unsaved.live.seq)
            unsaved.live.session.close()
        if errors:
            raise errors[0]

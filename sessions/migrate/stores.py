"""A whole store, a session at a time: carried, committed by one guarded swap each, and begun again where it
stopped. The source is only ever read; what is written to meanwhile is seen, and carried again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from itertools import islice
from types import TracebackType
from typing import Self

from engine.errors import (
    LeaseHeld,
    SessionError,
    SessionExists,
    StaleSession,
    StateError,
    StoreError,
    StoreUnavailable,
    TenutoError,
)
from serialization.blobs import Store
from serialization.manifest import Manifest
from sessions import names
from sessions.catalog import Catalog, is_there
from sessions.lease import LEASES, read_lease
from sessions.manager import SessionManager
from sessions.migrate.carry import Carried, Carrier
from sessions.migrate.found import Item
from sessions.migrate.journal import Journal, Line, Standing
from sessions.migrate.moved import Moved, Problem, Progress, Told
from sessions.migrate.plan import Plan
from sessions.migrate.planning import plan_of
from sessions.migrate.request import Request
from sessions.migrate.survey import Clash, Survey
from sessions.prefix import PrefixIndex
from sessions.uses import USES

#: Sessions that are carried together, before they are committed one by one.
_BATCH = 64
#: How often a source that is written to is gone through again.
_ROUNDS = 3
#: How many are told of by name before nothing is begun.
_TOLD = 5


class StoreMigration:
    """From `source` to the store of `manager`, of one tenant. Close it, or use it in a `with`."""

    def __init__(
        self,
        source: Store,
        manager: SessionManager,
        ends: tuple[str, str],
        tag: bytes,
        request: Request,
        only: str | None = None,
    ) -> None:
        """`ends` are source and destination in words, `tag` stands for the source in the journal; `only` that
        session is moved, if one is given."""
        self._source = source
        self._only = only
        self._manager = manager
        self._target = manager.store
        self._ends = ends
        self._tag = tag
        self._journal = Journal(manager.store)
        self._prefixes = PrefixIndex(manager.store, manager.tenant)
        self._conversion = request.conversion
        self._catalog = Catalog(manager.store)
        self._clash = request.clash
        self._moved = Moved()
        self._ended: StoreError | None = None  # what others need not find out for themselves
        self._left_out: set[tuple[str, str]] = set()
        with ExitStack() as opened:
            self._pool = ThreadPoolExecutor(request.jobs, thread_name_prefix="migrate")
            opened.callback(self._pool.shutdown, wait=True, cancel_futures=True)
            self._survey = Survey(source, manager.store, tag, request.clash, self._pool, only)
            opened.callback(self._survey.close)
            self._fresh = manager.policy.grace / 4
            self._carrier = Carrier(
                source, manager.store, request.conversion, manager.room, self._fresh, request.newest
            )
            opened.callback(self._carrier.close)
            self._survey.look()
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def plan(self) -> Plan:
        """What would be done; changes nothing."""
        policy, tenant = self._manager.policy, self._manager.tenant
        return plan_of(
            self._source, self._survey, self._ends, tenant, policy, self._clash, self._conversion, self._pool
        )

    def run(self, told: Told = lambda progress: None) -> Moved:
        """Do it. What was moved when an error ends it stays, whole, and the next run goes on from there.

        Raises SessionExists before anything is written where something else is in a session's place, unless
        another way was chosen; StoreError of either side, QuotaExceeded.
        """
        self._refuse_clashes()
        moved, survey = self._moved, self._survey
        moved.before = survey.found.count(Standing.DONE)
        moved.ahead, moved.gone = survey.found.count(Standing.AHEAD), survey.found.count(Standing.GONE)
        moved.expired = survey.found.count(Standing.EXPIRED)
        moved.skipped = sum(1 for _ in survey.found.clashes())
        for item in survey.found.all(Standing.UNREADABLE):
            self._leave_out(item, item.why)
        for turn in range(_ROUNDS):
            for batch in self._batches():
                self._move(batch, turn)
                done = moved.num_sessions + moved.num_pins
                told(Progress(done, max(done, survey.found.num_moving()), self._carrier.nbytes))
            survey.look_again()
            if next(self._batches(), None) is None:
                break
        for item in (item for batch in self._batches() for item in batch):
            self._leave_out(item, "it went on while it was moved, every time; move it again")
        moved.nbytes = self._carrier.nbytes
        moved.session = self._arrived()
        moved.writing = self._writing()
        return moved

    def _arrived(self) -> str | None:
        """The id of the one session that was asked for, where it is there now."""
        if self._only is None:
            return None
        session = self._survey.found.session_there(self._only)
        return session if is_there(self._target, session) else None

    # --- steps --------------------------------------------------------------------------------

    def _refuse_clashes(self) -> None:
        if self._clash is not Clash.REFUSE:
            return
        clashes = list(islice(self._survey.found.clashes(), _TOLD + 1))
        if clashes:
            more = ", and others" if len(clashes) > _TOLD else ""
            told = "; ".join(f"{item.ref} {item.why}" for item in clashes[:_TOLD])
            raise SessionExists(
                f"{told}{more}: nothing was moved (--skip leaves them out,"
                " --rename finds them another place)",
                clashes=tuple(item.ref for item in clashes),
            )

    def _batches(self) -> Iterator[list[Item]]:
        items = (item for item in self._survey.found.moving() if (item.ref, item.taken) not in self._left_out)
        while batch := list(islice(items, _BATCH)):
            yield batch

    def _leave_out(self, item: Item, why: str) -> None:
        self._left_out.add((item.ref, item.taken))
        self._moved.problems.append(Problem(item.ref, why))

    def _move(self, batch: list[Item], turn: int) -> None:
        """Carry a batch, and commit what could be carried. An error of one session leaves that one out, one
        of a store ends the run, after the commits."""
        errors: list[StoreError] = []
        while batch:
            batch = self._move_some(batch, turn, errors)
        if errors:
            raise errors[0]

    def _move_some(self, batch: list[Item], turn: int, errors: list[StoreError]) -> list[Item]:
        """The same, once. What was carried waits for the others of its batch no longer than gc waits for it.
        Returns what is to be carried again, because it did."""
        with ExitStack() as granted:
            left = {self._pool.submit(self._carry, item, granted): item for item in batch}
            stale: list[Item] = []
            try:
                while left:
                    done = wait(left, timeout=self._fresh / 2).done
                    ended = [(item, future) for future, item in left.items() if future in done]
                    stale += self._take(ended, turn, errors)
                    left = {future: item for future, item in left.items() if future not in done}
            finally:
                for future in left:
                    future.cancel()
                wait(left)
        return stale

    def _take(
        self, ended: list[tuple[Item, Future[Carried | TenutoError]]], turn: int, errors: list[StoreError]
    ) -> list[Item]:
        """Commit what was carried. Returns what waited for too long."""
        carried, stale = [], []
        for item, future in ended:
            outcome = future.result()
            if isinstance(outcome, Carried):
                if self._carrier.is_fresh(outcome):
                    carried.append((item, outcome))
                else:
                    stale.append(item)
            elif isinstance(outcome, StoreError):
                errors.append(outcome)
            elif self._stands(item):  # else what it needed may be gone because it went on
                self._leave_out(item, str(outcome))
        self._commit(carried, turn)
        return stale

    def _carry(self, item: Item, granted: ExitStack) -> Carried | TenutoError:
        session = item.place.removeprefix(names.SESSIONS)
        where = self._survey.found.session_there if item.is_pin else lambda _: session
        if self._ended is not None:
            return self._ended
        try:
            return self._carrier.carry(item.taken, where, item.name, granted)
        except StoreError as error:
            self._ended = error
            return error
        except TenutoError as error:  # also of a conversion that this session does not allow
            return error

    def _stands(self, item: Item) -> bool:
        return self._source.read(item.ref) == item.taken.encode()

    def _commit(self, carried: list[tuple[Item, Carried]], turn: int) -> None:
        now = self._source.read_many([item.ref for item, _ in carried])
        # What went on since is carried again, as it is by then.
        ready = [
            (item, each)
            for (item, each), value in zip(carried, now, strict=True)
            if value == item.taken.encode()
        ]
        if not ready:
            return
        lines = {item.ref: self._line(item, each) for item, each in ready}
        # Hints too come before the commits, so that no kill comes between both: without a session they mean
        # nothing, and gc takes them.
        self._note_uses([item for item, _ in ready])
        self._journal.write(lines)
        outcomes = list(self._pool.map(lambda pair: self._swap(*pair), ready))
        done = []
        for (item, each), outcome in zip(ready, outcomes, strict=True):
            if outcome is None:
                done.append(item)
                self._moved.num_pins += item.is_pin
                self._moved.num_sessions += not item.is_pin
                self._moved.again += turn > 0
                self._moved.lost_blobs += each.lost
            elif not isinstance(outcome, StoreError):
                self._leave_out(item, str(outcome))
        self._journal.done({item.ref: lines[item.ref] for item in done})
        for outcome in outcomes:
            if isinstance(outcome, StoreError):
                raise outcome

    def _line(self, item: Item, carried: Carried) -> Line:
        return Line(self._tag, item.taken, item.place, carried.blob, item.over, item.named, item.name)

    def _swap(self, item: Item, carried: Carried) -> TenutoError | None:
        """The commit of one session or kept turn; why it could not be."""
        if isinstance(self._ended, StoreUnavailable):
            return self._ended
        try:
            if item.is_pin:
                self._swap_ref(item, carried, None)
                return None
            session = item.place.removeprefix(names.SESSIONS)
            if item.over is not None:
                self._refuse_written(session)
            guard = None if item.name is None else self._take_name(item.name, session)
            self._prefixes.add(carried.manifest, 0)
            self._swap_ref(item, carried, guard)
            with suppress(StoreError, StateError):  # a name is free when nobody has it
                self._drop_old_name(item, session)
        except SessionError as error:
            return error
        except StoreError as error:
            self._ended = error
            return error
        return None

    def _swap_ref(self, item: Item, carried: Carried, guard: tuple[str, bytes] | None) -> None:
        old, new = None if item.over is None else item.over.encode(), carried.blob.encode()
        if self._target.swap(item.place, old, new, guard):
            return
        if self._target.read(item.place) != new:  # else another migration of the same was faster
            raise StaleSession(f"{item.place} was changed in the destination meanwhile; it was left as it is")

    def _refuse_written(self, session: str) -> None:
        lease = read_lease(self._target, session)
        if lease is not None and lease.until > self._target.now():
            raise LeaseHeld(f"session {session} is being written to in the destination by {lease.holder}")

    def _take_name(self, name: str, session: str) -> tuple[str, bytes]:
        """Names the session, and what its commit is to be guarded by: the name is only kept for a session
        that is there, so that another one may take it in between. Raises SessionExists."""
        self._catalog.take_name(name, session)
        return names.name_ref(name), session.encode()

    def _drop_old_name(self, item: Item, session: str) -> None:
        """Of a session that was renamed in the source since it was moved before."""
        if item.over is None:
            return
        before = Manifest.decode(self._target.get(item.over)).name
        if before is not None and before != item.name:
            self._catalog.drop_name(before, session)

    def _note_uses(self, items: list[Item]) -> None:
        """When the sessions were last used, there as here."""
        sessions = [item for item in items if not item.is_pin]
        refs = [USES + item.ref.removeprefix(names.SESSIONS) for item in sessions]
        noted = self._source.read_many(refs)
        uses = {
            USES + item.place.removeprefix(names.SESSIONS): value
            for item, value in zip(sessions, noted, strict=True)
            if value is not None
        }
        self._target.hint(uses)

    def _writing(self) -> tuple[str, ...]:
        """Sessions that somebody is writing to in the source."""
        now, found = self._source.now(), []
        for ref, _ in self._source.list_refs(LEASES):
            session = ref.removeprefix(LEASES)
            lease = read_lease(self._source, session)
            if lease is not None and lease.until > now:
                found.append(session)
        return tuple(found)

"""Who may write to a session: a ref with a holder, an end and a fencing token.

`lease/<session>` holds msgpack {fence, holder, until}, and is absent while nobody writes. A takeover
raises the fence by one; where the ref is absent it starts at the store's clock in microseconds, so
that fences only rise and no two holders ever have the same value there. A save is guarded by the
holder's exact value (`swap`): after a takeover it cannot land, however late it comes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import msgpack

from engine.errors import IndexDamaged, LeaseHeld, LeaseLost, StoreError
from serialization.blobs import Store

LEASES = "lease/"

#: Seconds. A lease that ends later than this was taken by a clock that went back since, and bars nobody.
#: Its holder, if it lives, is told as after any takeover.
_LONGEST = 3600.0


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the ref holds: `until` in seconds since the epoch by the store's clock."""

    fence: int
    holder: str
    until: float

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb({"fence": self.fence, "holder": self.holder, "until": self.until})
        return packed


def read_lease(store: Store, session: str) -> LeaseRecord | None:
    """The lease on `session` as stored, ended or not; None if nobody has it."""
    value = store.read(LEASES + session)
    return None if value is None else _unpack(session, value)


def _unpack(session: str, value: bytes) -> LeaseRecord:
    try:
        fields = msgpack.unpackb(value)
        fence, holder, until = fields["fence"], fields["holder"], fields["until"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise IndexDamaged(f"the lease of {session} cannot be read") from error
    if type(fence) is not int or type(holder) is not str or type(until) is not float:
        raise IndexDamaged(f"the lease of {session} cannot be read")
    return LeaseRecord(fence, holder, until)


def describe_holder() -> str:
    """This process, for the person who is refused: 'pid P on HOST since T'."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"pid {os.getpid()} on {socket.gethostname()} since {since}"


def acquire(store: Store, session: str, holder: str | None = None, seconds: float = 30.0) -> Lease:
    """Takes the lease on `session` for `seconds`, if nobody has it or the last one ended.

    Raises LeaseHeld (details: holder, until, fence) while another holds it.
    """
    holder = describe_holder() if holder is None else holder
    while True:
        value = store.read(LEASES + session)
        last = None if value is None else _unpack(session, value)
        now = store.now()
        if last is not None and now < last.until <= now + max(seconds, _LONGEST):
            raise _held(session, last, now)
        record = LeaseRecord(int(now * 1e6) if last is None else last.fence + 1, holder, now + seconds)
        if store.swap(LEASES + session, value, record.pack()):
            return Lease(store, session, record, seconds)
        # Somebody else was faster: look again, which ends here unless that lease ended as well.


def _held(session: str, last: LeaseRecord, now: float) -> LeaseHeld:
    end = time.strftime("%H:%M:%S UTC", time.gmtime(last.until))
    return LeaseHeld(
        f"session {session} is being written by {last.holder}; the lease ends at {end}"
        f" (in {last.until - now:.0f} s) unless it is renewed",
        holder=last.holder,
        until=last.until,
        fence=last.fence,
    )


class Lease:
    """A lease that we hold. Safe from many threads; as a context manager it is closed at the end."""

    def __init__(self, store: Store, session: str, record: LeaseRecord, seconds: float) -> None:
        self._store = store
        self._record = record
        self._lock = threading.Lock()
        self._over = False
        self.session = session
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"Lease({self.session!r}, fence={self.fence}, holder={self.holder!r})"

    @property
    def fence(self) -> int:
        return self._record.fence

    @property
    def holder(self) -> str:
        return self._record.holder

    @property
    def until(self) -> float:
        return self._record.until

    @property
    def guard(self) -> tuple[str, bytes]:
        """The guard of a swap that only the holder may make. A renewal changes it: see `swap`."""
        with self._lock:
            return LEASES + self.session, self._record.pack()

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """`Store.swap` under this lease, with no renewal in between. Raises LeaseLost if it is not ours."""
        with self._lock:
            while not self._over:
                held = self._record
                if self._store.swap(name, old, new, (LEASES + self.session, held.pack())):
                    return True
                self._verify()
                if self._record == held:
                    return False
            raise LeaseLost(f"our lease on session {self.session} was given back")

    def renew(self, seconds: float | None = None) -> None:
        """Moves the end to `seconds` from now, also after it passed if nobody took over. Raises LeaseLost."""
        with self._lock:
            until = self._store.now() + (self.seconds if seconds is None else seconds)
            record = LeaseRecord(self.fence, self.holder, until)
            while self._over or not self._store.swap(
                LEASES + self.session, self._record.pack(), record.pack()
            ):
                held = self._record
                self._verify()
                if self._record == held:
                    raise LeaseLost(f"our lease on session {self.session} changed under us")
            self._record = record

    def verify(self) -> None:
        """Raises LeaseLost unless the store still names us."""
        with self._lock:
            self._verify()

    def close(self) -> None:
        """Ends the lease now, so that the next writer need not wait. Does nothing if it is not ours."""
        with self._lock:
            if not self._over:
                self._store.swap(LEASES + self.session, self._record.pack(), None)
                self._over = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _verify(self) -> None:
        if self._over:
            raise LeaseLost(f"our lease on session {self.session} was given back")
        now = read_lease(self._store, self.session)
        if now is not None and (now.fence, now.holder) == (self.fence, self.holder):
            self._record = now  # a renewal of ours that took place, though its answer was lost
        else:
            taker = "nobody" if now is None else now.holder
            raise LeaseLost(
                f"our lease on session {self.session} is over: {taker} has it",
                holder=taker,
                fence=None if now is None else now.fence,
            )


class KeepAlive:
    """A lease that a thread of its own renews until `close` (or the end of the `with` block).

    `error` is what stopped the renewals: LeaseLost, after which no save under this lease can land.
    While the store cannot be reached the thread goes on trying.
    """

    def __init__(
        self,
        store: Store,
        session: str,
        holder: str | None = None,
        seconds: float = 30.0,
        every: float | None = None,
    ) -> None:
        """Takes the lease, or raises LeaseHeld; renews it each `every` seconds (a third of its length)."""
        self.lease = acquire(store, session, holder, seconds)
        self.error: LeaseLost | None = None
        self._every = seconds / 3 if every is None else every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease {session}", daemon=True)
        self._thread.start()

    @property
    def guard(self) -> tuple[str, bytes]:
        """See `Lease.guard`."""
        return self.lease.guard

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """See `Lease.swap`."""
        return self.lease.swap(name, old, new)

    def verify(self) -> None:
        """See `Lease.verify`."""
        self.lease.verify()

    def close(self) -> None:
        """Ends the renewals and the lease."""
        self._stop.set()
        self._thread.join()
        self.lease.close()

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.lease.renew()
            except LeaseLost as error:
                self.error = error
                return
            except StoreError:
                continue

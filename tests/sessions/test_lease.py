"""One writer at a time, by the store's clock; a late one can never land."""

from __future__ import annotations

import threading
import time

import msgpack
import pytest

from engine.errors import IndexDamaged, LeaseHeld, LeaseLost
from sessions.lease import LEASES, KeepAlive, acquire, read_lease
from sessions.stores.memory import MemoryStore
from tests.faults import FaultyStore
from tests.sessions.clock import Clock


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def test_the_second_writer_is_told_who_holds_it_and_until_when(store: MemoryStore) -> None:
    lease = acquire(store, "s1", "pid 1 on host since today", seconds=30)
    with pytest.raises(LeaseHeld) as caught:
        acquire(store, "s1", "other")
    assert "pid 1 on host since today" in str(caught.value)
    assert "13:47:10 UTC (in 30 s)" in str(caught.value)
    details = {"holder": lease.holder, "until": 1_000_030.0, "fence": lease.fence}
    assert caught.value.details == details
    assert acquire(store, "s2", "other").session == "s2"


def test_what_is_stored_is_the_record_by_its_names(store: MemoryStore) -> None:
    lease = acquire(store, "s1", "me", seconds=30)
    value = store.read(LEASES + "s1")
    assert value is not None
    assert msgpack.unpackb(value) == {"fence": lease.fence, "holder": "me", "until": 1_000_030.0}
    assert lease.guard == ("lease/s1", value)


def test_the_default_holder_says_which_process(store: MemoryStore) -> None:
    import os
    import socket

    lease = acquire(store, "s1")
    assert lease.holder.startswith(f"pid {os.getpid()} on {socket.gethostname()} since ")


def test_a_lease_ends_by_itself_and_its_taker_has_a_higher_fence(store: MemoryStore, clock: Clock) -> None:
    first = acquire(store, "s1", "crashed", seconds=30)
    clock.now += 29.9
    with pytest.raises(LeaseHeld):
        acquire(store, "s1", "next")
    clock.now += 0.1
    second = acquire(store, "s1", "next", seconds=30)
    assert second.fence == first.fence + 1
    for act in (first.verify, first.renew, lambda: first.swap("x", None, b"late")):
        with pytest.raises(LeaseLost, match="next has it"):
            act()
    first.close()
    second.verify()
    assert store.read("x") is None


def test_fences_rise_over_releases_too(store: MemoryStore, clock: Clock) -> None:
    fences = []
    for _ in range(5):
        with acquire(store, "s1", "same holder") as lease:
            fences.append(lease.fence)
        clock.now += 0.001
    assert fences == sorted(set(fences))


def test_a_closed_lease_is_free_at_once_and_useless(store: MemoryStore) -> None:
    with acquire(store, "s1", "me") as lease:
        lease.verify()
    assert read_lease(store, "s1") is None
    for act in (lease.verify, lease.renew, lambda: lease.swap("x", None, b"late")):
        with pytest.raises(LeaseLost):
            act()
    lease.close()
    acquire(store, "s1", "next").verify()


def test_a_swap_under_the_lease_compares_as_well(store: MemoryStore) -> None:
    lease = acquire(store, "s1", "me")
    assert lease.swap("session/s1", None, b"1")
    assert not lease.swap("session/s1", None, b"2")
    assert lease.swap("session/s1", b"1", b"2")


def test_renewal_moves_the_end_and_the_guard(store: MemoryStore, clock: Clock) -> None:
    lease = acquire(store, "s1", "me", seconds=30)
    stale = lease.guard
    clock.now += 20
    lease.renew()
    assert lease.until == clock.now + 30
    assert not store.swap("x", None, b"1", guard=stale)
    assert store.swap("x", None, b"1", guard=lease.guard)
    clock.now += 29
    with pytest.raises(LeaseHeld):
        acquire(store, "s1", "other")


def test_an_ended_lease_that_nobody_took_can_be_renewed(store: MemoryStore, clock: Clock) -> None:
    lease = acquire(store, "s1", "slow", seconds=30)
    clock.now += 300
    assert lease.swap("x", None, b"still alone")
    lease.renew()
    with pytest.raises(LeaseHeld):
        acquire(store, "s1", "other")


def test_a_removed_lease_is_lost(store: MemoryStore) -> None:
    lease = acquire(store, "s1", "me")
    store.rebuild({})
    with pytest.raises(LeaseLost, match="nobody"):
        lease.renew()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"\x01",
        msgpack.packb({"fence": 1}),
        msgpack.packb({"fence": "1", "holder": "x", "until": 1.0}),
    ],
)
def test_a_lease_that_cannot_be_read_is_damage(store: MemoryStore, value: bytes) -> None:
    store.swap(LEASES + "s1", None, value)
    with pytest.raises(IndexDamaged):
        acquire(store, "s1", "me")


def test_of_many_at_once_one_gets_it(store: MemoryStore) -> None:
    won: list[str] = []
    start = threading.Barrier(8)

    def attempt(name: str) -> None:
        start.wait()
        try:
            acquire(store, "s1", name)
        except LeaseHeld:
            return
        won.append(name)

    threads = [threading.Thread(target=attempt, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_keep_alive_outlasts_the_lease_and_gives_it_back() -> None:
    store = MemoryStore()
    with KeepAlive(store, "s1", "me", seconds=0.3) as lease:
        deadline = time.monotonic() + 0.8
        num_swaps = 0
        while time.monotonic() < deadline:  # renewals never get between a swap and its guard
            assert lease.swap("x", None if num_swaps == 0 else b"%d" % (num_swaps - 1), b"%d" % num_swaps)
            num_swaps += 1
        with pytest.raises(LeaseHeld):
            acquire(store, "s1", "other")
        lease.verify()
        assert lease.error is None
    assert read_lease(store, "s1") is None


def test_keep_alive_rides_out_an_unreachable_store() -> None:
    faulty = FaultyStore(MemoryStore())
    with KeepAlive(faulty, "s1", "me", seconds=30, every=0.02) as lease:
        until = lease.lease.until
        faulty.plan = "." * faulty.num_calls + "r" * 5
        deadline = time.monotonic() + 10
        while lease.lease.until == until or faulty.num_calls < len(faulty.plan):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert lease.error is None


def test_keep_alive_stops_when_the_lease_is_lost() -> None:
    store = MemoryStore()
    with KeepAlive(store, "s1", "me", seconds=30, every=0.02) as lease:
        store.rebuild({})
        deadline = time.monotonic() + 10
        while lease.error is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(LeaseLost):
            lease.verify()
        with pytest.raises(LeaseLost):
            lease.swap("x", None, b"late")

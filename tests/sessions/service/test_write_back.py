"""Write-back: turns end before they are saved. What waits is bounded, told, waited for, and never lost in
silence."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, LeaseHeld, LeaseLost, StoreUnavailable
from serialization.blobs import BlobClass, BlobId, Bytes
from sessions.lease import LEASES, LeaseRecord, acquire
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.service.backend import Backend, BackendConfig
from sessions.service.told import Ended
from sessions.service.write_back import Bounds, WriteBack
from sessions.stores.base import StoreConfig
from sessions.stores.disk import DiskStore
from sessions.stores.redis import RedisStore
from sessions.stores.sealed import roomier
from sessions.stores.sealing import sealed_store
from tests.redis_server import RedisServer
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import ring
from tests.sessions.service.hearing import SAMPLED, SHORT, T, heard, user, wait_for
from tests.sessions.service.serving import served
from tests.sessions.service.test_serve import begin, serving

POLICY = Policy(lease=5, grace=10)
WIDE = Bounds(1 << 30, 60.0)


class SlowStore(DiskStore):
    """Writes of blobs wait while it is shut; what is refused raises instead of acting."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.refuses = False
        self.steps: list[str] = []

    def put(self, cls: BlobClass, data: Bytes) -> BlobId:
        self._pass()
        self.steps.append(cls)
        return super().put(cls, data)

    def swap(
        self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None = None
    ) -> bool:
        if name.startswith("session/"):
            self._pass()
            self.steps.append("swap")
        return super().swap(name, old, new, guard)

    def _pass(self) -> None:
        assert self.open.wait(60), "nobody opened the store"
        if self.refuses:
            raise StoreUnavailable("refused by the test")


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path / "slow")


Make = Callable[..., Backend]


@pytest.fixture
def make(make_engine: MakeEngine, store: SlowStore) -> Iterator[Make]:
    made: list[Backend] = []

    def make(bounds: Bounds = WIDE, **settings: Any) -> Backend:
        config = BackendConfig(policy=POLICY, write_back=bounds)
        made.append(Backend(make_engine(deterministic=True, **settings), lambda _: store, config))
        return made[-1]

    yield make
    store.open.set()
    store.refuses = False
    for backend in made:
        backend.close()


def waiting(backend: Backend) -> int:
    load = backend.load().write_back
    assert load is not None
    return load.num_turns


def pending_turn(backend: Backend, store: SlowStore, session: str, text: str) -> Ended:
    """A turn whose save waits for the store."""
    store.open.clear()
    ended = heard(backend.turn(T, session, user(text), SHORT))[2]
    assert (ended.pending, ended.etag, ended.saved, ended.save_error) == (True, None, None, None)
    assert waiting(backend) == 1
    return ended


def test_a_turn_ends_before_it_is_saved_and_says_so(make: Make, store: SlowStore) -> None:
    backend = make()
    session = backend.create(T, sampler=SAMPLED).id
    ended = pending_turn(backend, store, session, "one")
    with closing(DiskStore(store._root)) as other:
        stored = SessionManager(other)
        assert stored.manifest(session).messages == (), "it is in memory alone"
        with pytest.raises(LeaseHeld), acquire(other, session, "somebody else"):
            pass
        store.open.set()
        view = backend.get(T, session)  # who asks waits until it is stored
        assert view.messages[-1].text == ended.replies[0].text
        assert stored.manifest(session).messages == view.messages
        assert stored.check().clean
    assert view.resident
    assert waiting(backend) == 0


def test_a_save_in_the_background_takes_its_steps_in_order(make: Make, store: SlowStore) -> None:
    backend = make()
    session = backend.create(T).id
    store.steps.clear()
    pending_turn(backend, store, session, "one " * 300)
    store.open.set()
    backend.get(T, session)
    assert store.steps[-2:] == ["manifest", "swap"]
    assert set(store.steps[:-2]) == {"rows"}
    assert len(store.steps) > 3


def test_turns_say_what_they_say_without_it(make: Make, store: SlowStore, make_engine: MakeEngine) -> None:
    backend = make()
    plain = Backend(
        make_engine(deterministic=True),
        lambda _: DiskStore(store._root.parent / "plain"),
        BackendConfig(policy=POLICY),
    )
    with closing(plain):
        sessions = [each.create(T, sampler=SAMPLED).id for each in (backend, plain)]
        for text in ("one", "two", "three"):
            said = [
                heard(each.turn(T, session, user(text), SHORT))
                for each, session in zip((backend, plain), sessions, strict=True)
            ]
            assert said[0][1] == said[1][1]
            assert said[0][0].restored.detail == ("" if text == "one" else "in memory")
        messages = [
            each.get(T, session).messages for each, session in zip((backend, plain), sessions, strict=True)
        ]
        assert messages[0] == messages[1]


def test_the_next_turn_waits_for_the_one_before_it(make: Make, store: SlowStore) -> None:
    backend = make()
    session = backend.create(T).id
    pending_turn(backend, store, session, "one")
    told: list[Ended] = []
    asking = threading.Thread(
        target=lambda: told.append(heard(backend.turn(T, session, user("two"), SHORT))[2])
    )
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    assert told == []
    store.open.set()
    asking.join(60)
    assert told[0].save_error is None
    view = backend.get(T, session)
    assert [m.text for m in view.messages if m.role == "user"] == ["one", "two"]


def test_beyond_the_bound_in_bytes_turns_are_saved_before_they_end(make: Make) -> None:
    backend = make(Bounds(1))
    session = backend.create(T).id
    ended = heard(backend.turn(T, session, user("one"), SHORT))[2]
    assert not ended.pending
    assert ended.saved is not None
    assert ended.etag == backend.get(T, session).etag


def test_beyond_the_bound_in_time_turns_are_saved_before_they_end(make: Make, store: SlowStore) -> None:
    backend = make(Bounds(1 << 30, 0.05))
    one, two = backend.create(T).id, backend.create(T).id
    pending_turn(backend, store, one, "one")
    wait_for(lambda: (load := backend.load().write_back) is not None and load.seconds > 0.05)
    told: list[Ended] = []
    asking = threading.Thread(target=lambda: told.append(heard(backend.turn(T, two, user("two"), SHORT))[2]))
    asking.start()
    asking.join(0.5)
    assert told == [], "it waits for the store itself"
    store.open.set()
    asking.join(60)
    assert not told[0].pending
    assert told[0].saved is not None


def test_waiting_turns_leave_sequences_for_others(make: Make, store: SlowStore) -> None:
    backend = make(num_seqs=2)
    sessions = [backend.create(T).id for _ in range(2)]
    pending_turn(backend, store, sessions[0], "one")
    begun = next(turn := backend.turn(T, sessions[1], user("two"), SHORT))
    assert begun is not None
    store.open.set()
    *_, ended = turn
    assert isinstance(ended, Ended)
    assert not ended.pending or waiting(backend) <= 1


def test_a_turn_waits_for_the_cells_of_one_that_is_being_saved(make: Make, store: SlowStore) -> None:
    backend = make(num_seqs=2, num_cells=512, n_ctx=512)
    one, two = backend.create(T).id, backend.create(T).id
    pending_turn(backend, store, one, "one " * 20)
    threading.Timer(0.5, store.open.set).start()
    ended = heard(backend.turn(T, two, user("a b c d " * 60), SHORT))[2]  # all the cells but a few
    assert ended.save_error is None


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_more_sessions_than_sequences_all_get_through(make: Make, num_seqs: int) -> None:
    backend = make(num_seqs=num_seqs)
    sessions = [backend.create(T).id for _ in range(4)]
    for turn in range(2):
        for session in sessions:
            assert heard(backend.turn(T, session, user(f"{turn}"), SHORT))[2].save_error is None
    assert all(len(backend.get(T, session).messages) == 4 for session in sessions)


def test_a_save_that_fails_keeps_the_turn_in_memory_and_the_next_turn_tells(
    make: Make, store: SlowStore
) -> None:
    backend = make()
    session = backend.create(T, sampler=SAMPLED).id
    pending_turn(backend, store, session, "one")
    store.refuses = True
    store.open.set()
    wait_for(lambda: waiting(backend) == 0)
    assert backend.load().unsaved == 1
    load = backend.load().write_back
    assert load is not None
    assert (load.num_saved, load.num_failed) == (0, 1)
    begun, _, ended = heard(backend.turn(T, session, user("two"), SHORT))
    assert begun.restored.detail == "in memory"
    if ended.pending:  # the next failure is known later as well
        wait_for(lambda: waiting(backend) == 0)
    with pytest.raises(StoreUnavailable):
        backend.save(T, session)
    store.refuses = False
    backend.save(T, session)
    said = [m.text for m in backend.get(T, session).messages if m.role == "user"]
    assert said == ["one", "two"]


def test_a_turn_that_is_lost_to_another_writer_is_told_once(make: Make, store: SlowStore) -> None:
    backend = make()
    session = backend.create(T).id
    pending_turn(backend, store, session, "one")
    with closing(DiskStore(store._root)) as other:
        name = LEASES + session
        taken = LeaseRecord(10**18, "a thief", other.now() + 60)
        assert other.swap(name, other.read(name), taken.pack())
        store.open.set()
        wait_for(lambda: waiting(backend) == 0)
        with pytest.raises(LeaseLost):
            heard(backend.turn(T, session, user("two"), SHORT))
        assert other.swap(name, other.read(name), None)
    assert heard(backend.turn(T, session, user("three"), SHORT))[2].save_error is None
    said = [m.text for m in backend.get(T, session).messages if m.role == "user"]
    assert said == ["three"]


def test_after_a_save_that_failed_turns_are_saved_before_they_end(make: Make, store: SlowStore) -> None:
    """A store that is down does not hear of one pending turn after the other, none of which is told."""
    backend = make()
    session = backend.create(T).id
    pending_turn(backend, store, session, "one")
    store.refuses = True
    store.open.set()
    wait_for(lambda: backend.load().unsaved == 1 and waiting(backend) == 0)
    backend._saving_again.close()
    ended = heard(backend.turn(T, session, user("two"), SHORT))[2]
    assert not ended.pending
    assert isinstance(ended.save_error, StoreUnavailable)
    store.refuses = False
    assert heard(backend.turn(T, session, user("three"), SHORT))[2].saved is not None
    assert heard(backend.turn(T, session, user("four"), SHORT))[2].pending


def test_a_turn_that_waited_beside_one_that_is_lost_is_told_too(make: Make, store: SlowStore) -> None:
    """It asked while the one before it was still said, so that nothing was lost yet."""
    backend = make()
    session = backend.create(T).id
    store.open.clear()
    first = backend.turn(T, session, user("one"), SHORT)
    next(first)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            heard(backend.turn(T, session, user("two"), SHORT))
        except LeaseLost as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(0.3)
    *_, ended = first
    assert isinstance(ended, Ended)
    assert ended.pending
    with closing(DiskStore(store._root)) as other:
        name = LEASES + session
        taken = LeaseRecord(10**18, "a thief", other.now() + 60)
        assert other.swap(name, other.read(name), taken.pack())
        store.open.set()
        wait_for(lambda: waiting(backend) == 0)
        assert other.swap(name, taken.pack(), None)
    asking.join(60)
    assert len(raised) == 1
    assert heard(backend.turn(T, session, user("three"), SHORT))[2].save_error is None


def test_what_waits_anew_is_not_forgotten_with_what_was_saved() -> None:
    """A session's next turn may be taken while its last one is just being forgotten."""
    back = WriteBack(WIDE, 8, 1024)
    first, second = threading.Event(), threading.Event()

    def save(until: threading.Event) -> None:
        assert until.wait(60)

    assert back.take(T, "s", 1, 1, lambda: save(first))
    assert back.take(T, "s", 1, 1, lambda: save(second))
    first.set()
    wait_for(lambda: back.load().num_saved == 1)
    assert back.load().num_turns == 1
    second.set()
    back.stored(T, "s")
    back.close()
    assert back.load().num_saved == 2
    assert back.load().num_failed == 0


def test_it_ends_with_everything_stored(make: Make, store: SlowStore) -> None:
    backend = make()
    sessions = [backend.create(T).id for _ in range(3)]
    store.open.clear()
    for session in sessions:
        assert heard(backend.turn(T, session, user("last words"), SHORT))[2].pending
    threading.Timer(0.2, store.open.set).start()
    backend.drain(30)
    with closing(DiskStore(store._root)) as other:
        manager = SessionManager(other)
        for session in sessions:
            assert len(manager.manifest(session).messages) == 2
            manager.open(session).close()  # and its lease was given back


def test_what_is_done_to_a_session_waits_for_its_turn(make: Make, store: SlowStore) -> None:
    backend = make()
    verbs: Mapping[str, Callable[[str], object]] = {
        "fork": lambda s: backend.fork(T, s),
        "rewind": lambda s: backend.rewind(T, s),
        "rename": lambda s: backend.rename(T, s, "renamed"),
        "pin": lambda s: backend.pin(T, s, "kept"),
        "save": lambda s: backend.save(T, s),
        "delete": lambda s: backend.delete(T, s),
    }
    for name, verb in verbs.items():
        session = backend.create(T).id
        pending_turn(backend, store, session, name)
        threading.Timer(0.1, store.open.set).start()
        verb(session)
        assert waiting(backend) == 0
    assert len(backend.list(T).sessions) == len(verbs)


def test_bounds_of_nothing_are_refused() -> None:
    for bad in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ConfigError):
            Bounds(*bad)


def test_a_client_is_told_that_its_turn_is_pending(make: Make, store: SlowStore) -> None:
    backend = make()
    with served(backend) as at:
        session = at.client.post("/v1/sessions").json()["id"]
        store.open.clear()
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = at.client.post(f"/v1/sessions/{session}/messages", json=body)
        told = answer.json()
        assert (told["pending"], told["saved"], told["etag"], told["save_error"]) == (True, None, None, None)
        assert "etag" not in answer.headers
        text = at.client.get("/metrics").text
        assert "tenuto_write_back_turns 1.0" in text
        store.open.set()
        assert at.client.get(f"/v1/sessions/{session}").headers["etag"]
        assert "tenuto_written_back_total 1.0" in at.client.get("/metrics").text


@pytest.mark.redis
@pytest.mark.parametrize("sealed", [False, True])
def test_every_kind_of_store_is_written_back_to(
    make_engine: MakeEngine, redis_server: RedisServer, tmp_path: Path, sealed: bool
) -> None:
    with closing(redis_server.client()) as client:
        client.flushall()

    def open_store(tenant: str) -> Any:
        config = roomier(StoreConfig()) if sealed else StoreConfig()
        inner = RedisStore(redis_server.url, tenant, config)
        return sealed_store(inner, ring(tmp_path / "keys"), tenant, StoreConfig()) if sealed else inner

    config = BackendConfig(policy=POLICY, write_back=WIDE)
    with closing(Backend(make_engine(), open_store, config)) as backend:
        session = backend.create(T).id
        for text in ("one", "two"):
            assert heard(backend.turn(T, session, user(text), SHORT))[2].pending
    with closing(open_store(T)) as store:
        manager = SessionManager(store)
        assert len(manager.manifest(session).messages) == 4
        assert manager.check().clean


def test_a_process_that_is_killed_loses_no_more_than_what_was_pending(
    tiny_path: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    with serving(tiny_path, store, "--write-back", "1G") as process:
        session = begin(process)
        with process.client() as client:
            for _ in range(3):
                told = client.post(f"/v1/sessions/{session}/messages", json=body).json()
                assert told["pending"]
        os.kill(process.popen.pid, signal.SIGKILL)
        process.popen.wait(60)
    with closing(DiskStore(store, "default")) as disk:
        manager = SessionManager(disk)
        turns = sum(message.role == "user" for message in manager.manifest(session).messages)
        assert turns in (2, 3), "each turn but the last was waited for by the next"
        assert manager.check().clean
    with serving(tiny_path, store) as process, process.client() as client:
        wait_for(lambda: client.post(f"/v1/sessions/{session}/messages", json=body).status_code == 200, 90)
        assert client.get(f"/v1/sessions/{session}").json()["turns"] == turns + 1

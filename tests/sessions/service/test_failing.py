"""Where the store or the model fails, what was said is kept and told of, and the backend goes on."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.errors import (
    EngineError,
    LeaseHeld,
    LeaseLost,
    NoSlot,
    SessionError,
    SessionNotFound,
    StaleSession,
    StoreUnavailable,
)
from sessions.lease import LEASES, LeaseRecord, acquire
from sessions.policy import Policy
from sessions.service.ask import Ask
from sessions.service.backend import Backend, BackendConfig
from sessions.service.told import Begun, Ended
from sessions.stores.disk import DiskStore
from tests.faults import FaultyStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.hearing import SAMPLED, SHORT, T, heard, user, wait_for


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(DiskStore(tmp_path / "faulty", T))


@pytest.fixture
def backend(make_engine: MakeEngine, store: FaultyStore) -> Iterator[Backend]:
    engine = make_engine(deterministic=True)
    made = Backend(engine, lambda _: store, BackendConfig(policy=Policy(lease=5, grace=10)))
    yield made
    up(store)
    made.close()


def down(store: FaultyStore) -> None:
    """Every call fails from now on."""
    store.plan = "." * store.num_calls + "r" * 100_000


def up(store: FaultyStore) -> None:
    store.plan = ""


def fails_at_the_save(backend: Backend, store: FaultyStore, session: str, text: str) -> Ended:
    told = backend.turn(T, session, user(text), SHORT)
    begun = next(told)
    assert isinstance(begun, Begun)
    down(store)
    *_, ended = told
    assert isinstance(ended, Ended)
    return ended


def test_a_turn_that_cannot_be_saved_stays_in_memory_and_says_so(
    backend: Backend, store: FaultyStore, make_backend: MakeBackend
) -> None:
    session = backend.create(T, sampler=SAMPLED).id
    etag = heard(backend.turn(T, session, user("one"), SHORT))[2].etag
    ended = fails_at_the_save(backend, store, session, "two")
    assert isinstance(ended.save_error, StoreUnavailable)
    assert (ended.session, ended.etag, ended.saved) == (session, etag, None)
    assert backend.load().unsaved == 1
    _, _, third = heard(backend.turn(T, session, user("three"), SHORT))  # the store is down still
    assert third.save_error is not None
    with pytest.raises(StoreUnavailable):
        backend.save(T, session)
    up(store)
    assert len(backend.get(T, session).messages) == 2
    with pytest.raises(LeaseHeld), acquire(store, session, "somebody else"):  # nor may another process
        pass
    archive = io.BytesIO()
    backend.export(T, session, archive)
    _, _, fourth = heard(backend.turn(T, session, user("four"), SHORT))
    assert (fourth.save_error, backend.load().unsaved) == (None, 0)
    view = backend.get(T, session)
    assert [m.text for m in view.messages if m.role == "user"] == ["one", "two", "three", "four"]
    other = make_backend(deterministic=True)
    alone = other.create(T, sampler=SAMPLED).id
    for text in ("one", "two", "three", "four"):
        _, reply, _ = heard(other.turn(T, alone, user(text), SHORT))
    assert reply == view.messages[-1].text
    assert len(other.import_(T, io.BytesIO(archive.getvalue())).messages) == 6


def test_a_save_is_tried_again_when_it_is_asked_for(backend: Backend, store: FaultyStore) -> None:
    session = backend.create(T).id
    fails_at_the_save(backend, store, session, "one")
    up(store)
    view, saved = backend.save(T, session)
    assert saved is not None
    assert len(view.messages) == 2
    assert backend.save(T, session)[1] is None
    assert heard(backend.turn(T, session, user("two"), SHORT))[0].restored.detail == "in memory"


def test_what_is_unsaved_is_saved_at_the_end(backend: Backend, store: FaultyStore) -> None:
    session = backend.create(T).id
    fails_at_the_save(backend, store, session, "one")
    up(store)
    backend.drain(1)
    assert len(backend.get(T, session).messages) == 2
    with acquire(store, session, "somebody else"):
        pass


def test_a_turn_that_fails_leaves_what_is_unsaved_as_it_was(backend: Backend, store: FaultyStore) -> None:
    session = backend.create(T).id
    fails_at_the_save(backend, store, session, "one")
    with pytest.raises(EngineError):
        list(backend.edit(T, session, "x" * 5000, SHORT))
    up(store)
    assert len(backend.save(T, session)[0].messages) == 2


def test_a_session_that_was_taken_over_is_not_overwritten(
    backend: Backend, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = backend.create(T).id
    heard(backend.turn(T, session, user("one"), SHORT))
    told = backend.turn(T, session, user("two"), SHORT)
    next(told)
    ref = f"lease/{session}"
    store.swap(ref, store.read(ref), None)
    with acquire(store, session, "somebody else"):
        *_, ended = told
    assert isinstance(ended, Ended)
    assert isinstance(ended.save_error, LeaseLost | SessionError)
    assert len(backend.get(T, session).messages) == 2
    heard(backend.turn(T, session, user("again"), SHORT))


def test_a_stateless_call_needs_no_store(backend: Backend, store: FaultyStore) -> None:
    _, text, _ = heard(backend.complete(T, user("one"), SHORT))
    down(store)
    begun, again, ended = heard(backend.complete(T, user("one"), SHORT))
    assert again == text
    assert begun.restored.restored > 0  # of memory
    assert isinstance(ended.save_error, StoreUnavailable)
    assert (ended.session, ended.etag) == (None, None)


def test_a_turn_without_its_store_is_refused_before_a_word(backend: Backend, store: FaultyStore) -> None:
    session = backend.create(T).id
    down(store)
    with pytest.raises(StoreUnavailable):
        list(backend.turn(T, session, user("one"), SHORT))
    up(store)
    heard(backend.turn(T, session, user("one"), SHORT))


def test_a_model_that_fails_in_a_turn_ends_it_and_keeps_what_was_said(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = backend.create(T).id
    told = backend.turn(T, session, user("one"), Ask(max_tokens=200))
    next(told)
    next(told)
    with monkeypatch.context() as patch:
        patch.setattr(backend._engine._model, "forward", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            list(told)
        with pytest.raises(EngineError):
            list(backend.turn(T, session, user("two"), SHORT))
        with pytest.raises(EngineError):
            list(backend.complete(T, user("two"), SHORT))
    assert [m.role for m in backend.get(T, session).messages] == ["user", "assistant"]
    heard(backend.turn(T, session, user("two"), SHORT))
    assert backend.load().running == 0


def test_what_is_unsaved_is_not_lost_for_others_and_they_are_told(
    make_engine: MakeEngine, store: FaultyStore
) -> None:
    backend = Backend(
        make_engine(num_seqs=2), lambda _: store, BackendConfig(policy=Policy(lease=5, grace=10))
    )
    sessions = [backend.create(T).id for _ in range(3)]
    for session in sessions[:2]:
        fails_at_the_save(backend, store, session, "one")
        up(store)
    with pytest.raises(NoSlot, match="could not be saved"):
        list(backend.turn(T, sessions[2], user("one"), SHORT))
    heard(backend.turn(T, sessions[1], user("two"), SHORT))  # who has one needs no other
    fails_at_the_save(backend, store, sessions[1], "three")
    up(store)
    backend.save(T, sessions[0])
    heard(backend.turn(T, sessions[2], user("one"), SHORT))
    backend.close()


def test_by_its_name_too_a_session_that_is_unsaved_needs_no_other_sequence(
    make_engine: MakeEngine, store: FaultyStore
) -> None:
    config = BackendConfig(policy=Policy(lease=5, grace=10))
    with closing(Backend(make_engine(num_seqs=1), lambda _: store, config)) as backend:
        session = backend.create(T, "named").id
        fails_at_the_save(backend, store, session, "one")
        backend._saving_again.close()
        up(store)
        heard(backend.turn(T, "named", user("two"), SHORT))
        assert users(backend, session) == ["one", "two"]


def test_more_replies_than_there_can_be_are_refused(make_backend: MakeBackend) -> None:
    backend = make_backend(num_seqs=2)
    session = backend.create(T).id
    with pytest.raises(NoSlot):
        list(backend.turn(T, session, user("one"), Ask(max_tokens=3, num_replies=3)))
    heard(backend.turn(T, session, user("one"), Ask(max_tokens=3, num_replies=2)))


def users(backend: Backend, session: str) -> list[str]:
    return [m.text for m in backend.get(T, session).messages if m.role == "user"]


def test_a_delete_that_is_refused_leaves_what_is_unsaved_as_it_was(
    backend: Backend, store: FaultyStore
) -> None:
    session = backend.create(T).id
    first = heard(backend.turn(T, session, user("one"), SHORT))[2].etag
    heard(backend.turn(T, session, user("two"), SHORT))
    fails_at_the_save(backend, store, session, "three")
    with pytest.raises(StoreUnavailable):
        backend.delete(T, session)
    backend._saving_again.close()
    up(store)
    assert backend.load().unsaved == 1
    with pytest.raises(StaleSession):
        backend.delete(T, session, first)
    assert backend.load().unsaved == 1
    assert backend.save(T, session)[1] is not None
    assert users(backend, session) == ["one", "two", "three"]


def test_what_is_unsaved_is_deleted_with_its_session(backend: Backend, store: FaultyStore) -> None:
    session = backend.create(T).id
    before = heard(backend.turn(T, session, user("one"), SHORT))[2].etag
    fails_at_the_save(backend, store, session, "two")
    backend._saving_again.close()
    up(store)
    backend.delete(T, session, before)
    assert backend.load().unsaved == 0
    with pytest.raises(SessionNotFound):
        backend.get(T, session)
    with acquire(store, session, "somebody else"):  # its lease was given back
        pass


def test_what_is_unsaved_can_be_deleted_though_its_lease_was_lost(
    backend: Backend, store: FaultyStore
) -> None:
    session = backend.create(T).id
    heard(backend.turn(T, session, user("one"), SHORT))
    fails_at_the_save(backend, store, session, "two")
    backend._saving_again.close()
    up(store)
    assert store.swap(LEASES + session, store.read(LEASES + session), None)
    backend.delete(T, session)
    with pytest.raises(SessionNotFound):
        backend.get(T, session)


@pytest.mark.parametrize("verb", ["fork", "pin"])
def test_a_fork_and_a_pin_are_of_what_is_unsaved_too(backend: Backend, store: FaultyStore, verb: str) -> None:
    session = backend.create(T).id
    heard(backend.turn(T, session, user("one"), SHORT))
    fails_at_the_save(backend, store, session, "two")
    backend._saving_again.close()
    up(store)
    if verb == "fork":
        made = backend.fork(T, session).id
    else:
        backend.pin(T, session, "kept")
        made = backend.load_pin(T, "kept").id
    assert users(backend, made) == ["one", "two"]


def test_an_unsaved_turn_that_is_lost_to_another_writer_is_told_once(
    backend: Backend, store: FaultyStore
) -> None:
    """It is tried again when nobody asks, and so it may be lost then."""
    session = backend.create(T).id
    heard(backend.turn(T, session, user("one"), SHORT))
    fails_at_the_save(backend, store, session, "two")
    taken = LeaseRecord(10**18, "a thief", store.store.now() + 60)
    assert store.store.swap(LEASES + session, store.store.read(LEASES + session), taken.pack())
    up(store)
    wait_for(lambda: backend.load().unsaved == 0)
    with pytest.raises(LeaseLost):
        heard(backend.turn(T, session, user("three"), SHORT))
    assert store.swap(LEASES + session, taken.pack(), None)
    assert heard(backend.turn(T, session, user("four"), SHORT))[2].save_error is None
    assert users(backend, session) == ["one", "four"]


def test_what_is_lost_while_a_turn_waits_for_its_place_is_told_to_it(
    make_engine: MakeEngine, store: FaultyStore
) -> None:
    config = BackendConfig(max_turns=1, policy=Policy(lease=5, grace=10))
    with closing(Backend(make_engine(), lambda _: store, config)) as backend:
        first, other = backend.create(T).id, backend.create(T).id
        running = backend.turn(T, other, user("one"), SHORT)
        next(running)
        raised: list[BaseException] = []

        def ask() -> None:
            try:
                heard(backend.turn(T, first, user("two"), SHORT))
            except LeaseLost as error:
                raised.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: backend.load().waiting == 1)
        backend._common.lost.add(T, first, LeaseLost("taken over"))
        list(running)
        asking.join(60)
        assert [str(error) for error in raised] == ["taken over"]
        heard(backend.turn(T, first, user("three"), SHORT))  # its lease was given back

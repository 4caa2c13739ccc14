"""Many threads at once: nothing is lost or mixed up, nothing grows without end, and the end is orderly."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from engine.errors import Busy, Draining
from engine.state import SamplerParams
from sessions.policy import Policy
from sessions.service.ask import Ask, ChatMessage, Keep
from sessions.service.backend import Backend, BackendConfig
from sessions.service.told import Begun, Ended, Told
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.hearing import SHORT, T, heard, user, wait_for

POLICY = Policy(lease=5, grace=10)


def test_conversations_of_many_threads_say_what_they_say_alone(make_backend: MakeBackend) -> None:
    backend = make_backend(deterministic=True, num_seqs=4, num_cells=2048)
    alone = make_backend(deterministic=True)

    def converse(on: Backend, seed: int) -> list[str]:
        sampler = SamplerParams(temperature=1.0, seed=seed)
        session = on.create(T, sampler=sampler, system="be brief").id
        return [heard(on.turn(T, session, user(f"{turn} {seed} " * turn), SHORT))[1] for turn in range(1, 5)]

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda seed: converse(backend, seed), range(12)))
    assert together == [converse(alone, seed) for seed in range(12)]
    assert backend.load().running == 0
    assert backend.manager(T).check().clean


def test_64_threads_for_some_seconds(make_backend: MakeBackend) -> None:
    backend = make_backend(num_seqs=16, num_cells=16384)
    stop = time.monotonic() + 6
    counts = [0] * 64

    def work(number: int) -> None:
        session = backend.create(T).id
        said: list[ChatMessage] = []
        while time.monotonic() < stop:
            ask = Ask(max_tokens=5 + number % 7)
            if number % 3:
                heard(backend.turn(T, session, user(f"{number} and {counts[number]}"), ask))
            else:
                asked = [*said, ChatMessage("user", f"{number} and {counts[number]}")]
                _, text, ended = heard(backend.complete(T, asked, ask, (Keep.PAST, Keep.NOTHING)[number % 2]))
                assert ended.save_error is None
                said = [*asked, ChatMessage("assistant", text)]
            counts[number] += 1

    with ThreadPoolExecutor(64) as pool:
        for future in [pool.submit(work, number) for number in range(64)]:
            future.result(60)
    assert all(counts)
    load = backend.load()
    assert (load.running, load.waiting, load.unsaved) == (0, 0, 0)
    assert load.resident <= 16
    slots = backend._engine._slots
    assert not slots._live
    assert len(slots._idle) <= 17
    assert not backend._driver._streams
    assert backend.manager(T).check().clean


def test_who_finds_too_many_waiting_is_told_when_to_come_again(make_backend: MakeBackend) -> None:
    backend = make_backend(BackendConfig(max_turns=1, max_waiting=1, policy=POLICY))
    one, two, three = (backend.create(T).id for _ in range(3))
    told = backend.turn(T, one, user("one"), Ask(max_tokens=100))
    next(told)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: heard(backend.turn(T, two, user("two"), SHORT)))
        wait_for(lambda: backend.load().waiting == 1)
        with pytest.raises(Busy) as refused:
            list(backend.turn(T, three, user("three"), SHORT))
        assert refused.value.details["retry_after"] >= 1  # type: ignore[operator]
        assert not waits.done()
        list(told)
        waits.result(30)
    heard(backend.turn(T, three, user("three"), SHORT))


def test_who_goes_away_while_it_waits_waits_no_longer(make_backend: MakeBackend) -> None:
    backend = make_backend(BackendConfig(max_turns=1, policy=POLICY))
    one, two = (backend.create(T).id for _ in range(2))
    told, gone = backend.turn(T, one, user("one"), Ask(max_tokens=100)), threading.Event()
    next(told)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(
            lambda: list(backend.turn(T, two, user("two"), replace(SHORT, cancel=gone.is_set)))
        )
        wait_for(lambda: backend.load().waiting == 1)
        gone.set()
        with pytest.raises(Busy):
            waits.result(30)
    assert backend.load().waiting == 0
    list(told)
    assert backend.get(T, two).messages == ()


def test_turns_wait_for_cells_and_are_not_refused(make_backend: MakeBackend) -> None:
    backend = make_backend(num_seqs=8, num_cells=1024, n_ctx=1024)
    text = "some words that take up some room. " * 20

    def work(number: int) -> str:
        return heard(backend.complete(T, user(f"{number} {text}"), Ask(max_tokens=20), Keep.NOTHING))[1]

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(work, range(8)))) == 8


def test_draining_lets_turns_end_and_takes_no_more(make_backend: MakeBackend) -> None:
    backend = make_backend()
    session = backend.create(T).id
    told: list[Told] = []
    turn = threading.Thread(
        target=lambda: told.extend(backend.turn(T, session, user("x"), Ask(max_tokens=60)))
    )
    turn.start()
    wait_for(lambda: len(told) > 3)
    backend.drain(30)
    turn.join(10)
    assert isinstance(told[-1], Ended)
    assert told[-1].replies[0].finish in ("length", "eos")
    with pytest.raises(Draining):
        list(backend.turn(T, session, user("y"), SHORT))
    assert backend.load().draining
    assert len(backend.get(T, session).messages) == 2
    other = make_backend()
    heard(other.turn(T, session, user("y"), SHORT))  # the lease was given back


def test_a_drain_that_has_no_time_cuts_replies_short_and_saves_them(make_backend: MakeBackend) -> None:
    backend = make_backend()
    session = backend.create(T).id
    told: list[Told] = []
    turn = threading.Thread(
        target=lambda: told.extend(backend.turn(T, session, user("x"), Ask(max_tokens=1900)))
    )
    turn.start()
    wait_for(lambda: len(told) > 3)
    backend.close()
    turn.join(10)
    assert isinstance(told[0], Begun)
    assert isinstance(told[-1], Ended)
    assert told[-1].replies[0].finish == "cancelled"
    view = make_backend().get(T, session)
    assert view.messages[-1].text == told[-1].replies[0].text
    assert view.etag == told[-1].etag


def test_a_turn_waits_for_the_room_that_its_restore_takes(make_backend: MakeBackend) -> None:
    """Found by many clients of few cells: rows were put back before there was room for them."""
    backend = make_backend(num_seqs=4, num_cells=2048)
    sessions = [backend.create(T).id for _ in range(2)]
    for session, word in zip(sessions, ("tea", "rum"), strict=True):
        heard(backend.turn(T, session, user(f"{word} and more of it, " * 56), Ask(max_tokens=2)))
    lengths = [backend.get(T, session).length for session in sessions]
    assert min(lengths) < 2048 < sum(lengths)
    first = backend.turn(T, sessions[0], user("more"), Ask(max_tokens=4))
    assert isinstance(next(first), Begun)  # its cells are taken, and nobody reads on
    with closing(first), ThreadPoolExecutor(1) as pool:
        second = pool.submit(lambda: heard(backend.turn(T, sessions[1], user("more"), Ask(max_tokens=4))))
        wait_for(lambda: backend.load().running == 2 or second.done())
        time.sleep(0.2)  # long enough for a restore, had it begun
        assert not second.done()
        assert isinstance(list(first)[-1], Ended)
        assert second.result(60)[2].save_error is None

"""Who leaves a pass in the middle of it on one rank lets the others wait in theirs: so signals wait until it
is over, and what fails in it ends the model."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.errors import RankLost
from engine.parallel.signals import Deferral, undivided
from engine.runner import Engine
from engine.state import SeqId
from tests.engine.parallel.threads import ThreadGroup, divided
from tests.exact.members import folder
from tests.oracles import base

IDS = base.tokens(count=40)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of a Python program; and afterwards those that there were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_until_what_it_came_in_is_done() -> None:
    done: list[str] = []

    def work() -> None:
        with undivided():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_each_signal_goes_to_its_own_handler_once() -> None:
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    deferral = Deferral()
    deferral.begin()
    deferral.begin()
    signal.raise_signal(signal.SIGTERM)
    assert got == []
    deferral.end()
    deferral.end()
    assert got == [signal.SIGTERM]


def test_signals_that_are_ignored_stay_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with undivided():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def in_total(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], None]) -> None:
    """Do something in rank 0's total of that number, counted from now."""
    whole, count = ThreadGroup.total, 0

    def total(self: ThreadGroup, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if self.share.rank == 0:
            count += 1
            if count == number:
                do()
        return whole(self, x)

    monkeypatch.setattr(ThreadGroup, "total", total)


def filled(engine: Engine) -> SeqId:
    seq = engine.create()
    engine.feed(seq, IDS[:20])
    return seq


def test_ctrl_c_in_a_pass_is_as_if_the_pass_had_not_been(monkeypatch: pytest.MonkeyPatch) -> None:
    with divided(folder("llama"), 2) as engine:
        seq = filled(engine)
        before = engine.snapshot(seq)
        in_total(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            engine.advance({seq: IDS[20:24]})
        monkeypatch.undo()
        after = engine.snapshot(seq)
        assert after.tokens == before.tokens
        assert all(torch.equal(a, b) for a, b in zip(after.rows[0].parts, before.rows[0].parts, strict=True))
        engine.advance({seq: IDS[20:24]})


def fail() -> None:
    raise MemoryError


def test_a_pass_that_broke_off_ends_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this rank alone: the others wait in the middle of theirs."""
    with divided(folder("llama"), 2) as engine:
        seq = filled(engine)
        in_total(monkeypatch, 2, fail)
        with pytest.raises(MemoryError):
            engine.advance({seq: IDS[20:24]})
        assert engine.length(seq) == 20
        with pytest.raises(RankLost, match="a pass was left in the middle"):
            engine.advance({seq: IDS[20:24]})


def test_what_fails_behind_the_last_total_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are done by then: they are told so, and nothing is lost."""
    with divided(folder("llama"), 2) as engine:
        seq = filled(engine)
        before = engine.snapshot(seq)
        with monkeypatch.context() as patch:
            patch.setattr("engine.models.llama.Llama.logits_of", lambda *_: fail(), raising=False)
            patch.setattr(engine._model, "_norm", lambda *_: fail())
            with pytest.raises(MemoryError):
                engine.advance({seq: IDS[20:24]})
        again = engine.snapshot(seq)
        assert again.tokens == before.tokens
        engine.advance({seq: IDS[20:24]})

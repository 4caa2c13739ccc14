"""Whatever fails during a save, the session is at its old turn or its new one, and the next save works."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import StoreFull, StoreUnavailable
from engine.runner import Engine
from engine.speculative.model_drafter import ModelDrafter
from engine.state import SeqId
from serialization.blobs import Store
from serialization.snapshot import read_state
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.session import Session
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from tests.faults import FaultyStore, IoFaults
from tests.sessions.conftest import MakeEngine
from tests.tiny import write_tiny

POLICY = Policy(lease=30, grace=60)


@pytest.fixture(params=["plain", "drafting"])
def engine(
    request: pytest.FixtureRequest, make_engine: MakeEngine, windowed_path: Path, tmp_path: Path
) -> Engine:
    """One that drafts has blobs of its drafter in every save: rows, and windows that are written anew."""
    if request.param == "plain":
        return make_engine()
    engine = make_engine(windowed_path)
    drafter = make_engine(write_tiny(tmp_path / "draft.gguf", "gemma3", seed=1, layers=7))
    engine.speculate(ModelDrafter(drafter, engine), 2)
    return engine


class Bench:
    """A session of two turns in the engine, of which one is stored."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine = engine
        self.manager = SessionManager(store, engine, POLICY)
        self.seq: SeqId = engine.create()
        self.session: Session = self.manager.create()
        self.turn("a" * 300)
        self.manager.save(self.session, self.seq, ())
        self.turn("b" * 300)

    def turn(self, text: str) -> None:
        self.engine.feed(self.seq, self.engine.tokenizer.encode(text))
        self.engine.decode([self.seq])
        self.engine.propose(self.seq)  # for this a drafter reads along

    def close(self) -> None:
        self.session.close()
        self.engine.close(self.seq)


def check_old_or_new(store: Store, session: str, engine: Engine) -> None:
    """The target and its draft, both of the old turn or both of the new one, and whole."""
    reader = SessionManager(store, policy=POLICY)
    manifest = reader.manifest(session)
    assert manifest.length in (300, 600)
    assert (manifest.draft is None) == (engine.drafter is None)
    assert manifest.draft is None or manifest.draft.length == manifest.length
    assert reader.check().clean
    assert read_state(store, manifest).length == manifest.length


def run_every_fault(bench: Callable[[], Bench], arm: Callable[[Bench, int], bool], store: Store) -> int:
    """`arm` saves with the n-th call failing and says whether it did. Returns how many calls there were."""
    for nth in itertools.count():
        made = bench()
        failed = arm(made, nth)
        check_old_or_new(store, made.session.id, made.engine)
        if not failed:
            made.close()
            return nth
        made.manager.save(made.session, made.seq, ())  # what a chat does at its next turn
        assert SessionManager(store).manifest(made.session.id).length == 600
        made.close()
    raise AssertionError


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_every_io_call_of_a_save_may_fail(engine: Engine, tmp_path: Path, code: int) -> None:
    faults = IoFaults()
    with faults.installed():
        store = DiskStore(tmp_path / "store", "default")

        def arm(bench: Bench, nth: int) -> bool:
            faults.arm(nth, code)
            try:
                bench.manager.save(bench.session, bench.seq, ())
            except (StoreFull, StoreUnavailable):
                return True
            finally:
                fired = faults.fired
                faults.disarm()
            return fired is not None  # a fault that the save could do without

        calls = run_every_fault(lambda: Bench(engine, store), arm, store)
    assert calls > 20


@pytest.mark.parametrize("letter", ["r", "R"])
def test_every_store_call_of_a_save_may_fail_before_or_after_it_acted(engine: Engine, letter: str) -> None:
    inner = MemoryStore()
    faulty = FaultyStore(inner)

    def arm(bench: Bench, nth: int) -> bool:
        faulty.plan, faulty.num_calls = "." * nth + letter, 0
        try:
            bench.manager.save(bench.session, bench.seq, ())
        except StoreUnavailable:
            return True
        finally:
            called, faulty.plan = faulty.num_calls, ""
        return called > nth

    assert run_every_fault(lambda: Bench(engine, faulty), arm, inner) >= 4

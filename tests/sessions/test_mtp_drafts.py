"""What a model's own layers know of a session is saved, resumed and cut with it, through a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.speculative.choice import Draft
from engine.state import PartKind, SeqId, parts_of
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.session import Session
from sessions.stores.memory import MemoryStore
from tests.oracles import deepseek_v3_mtp, qwen3_next_mtp
from tests.oracles.base import tokens

DEPTHS = {"deepseek_v3": 2, "qwen3_next": 1}
SETTINGS = {"dtype": "f32", "threads": 1, "n_ctx": 1024, "num_cells": 4096, "deterministic": True}


@pytest.fixture(params=DEPTHS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    module = {"deepseek_v3": deepseek_v3_mtp, "qwen3_next": qwen3_next_mtp}[request.param]
    module.oracle(DEPTHS[request.param], share=0.15, max_position_embeddings=1024).write(tmp_path)
    return tmp_path


def drafting(folder: Path) -> Engine:
    return load_engine(folder, EngineConfig.from_mapping(SETTINGS), draft=Draft("mtp", 3))


def turn(manager: SessionManager, session: Session, seq: SeqId, seed: int, count: int) -> None:
    manager.engine.feed(seq, tokens(seed, count))
    manager.engine.choose(seq)
    for _ in range(6):
        manager.engine.step(seq)
    manager.engine.mark(seq)
    manager.save(session, seq, ())


def test_a_resumed_session_guesses_as_one_that_never_stopped(folder: Path) -> None:
    manager = SessionManager(MemoryStore(), drafting(folder))
    session, seq = manager.create(), manager.engine.create()
    turn(manager, session, seq, 1, 300)
    turn(manager, session, seq, 2, 60)
    session.close()
    other = SessionManager(manager.store, drafting(folder))
    again = other.open(session.id)
    resumed, result = other.resume(again)
    stored = other.manifest(session.id).draft
    assert stored is not None
    depths = parts_of(stored.layout, PartKind.POINT)[0].shape[0]
    assert (result.reason, result.recomputed, result.draft) == (Reason.EXACT, 0, "restored")
    assert stored.length == manager.engine.length(seq) - depths
    for _ in range(12):
        assert other.engine.propose(resumed) == manager.engine.propose(seq) != ()
        assert other.engine.step(resumed) == manager.engine.step(seq)


def test_a_session_that_is_cut_to_an_earlier_turn_guesses_as_it_did_there(folder: Path) -> None:
    manager = SessionManager(MemoryStore(), drafting(folder))
    session, seq = manager.create(), manager.engine.create()
    turn(manager, session, seq, 1, 300)
    length, pending, guesses = (
        manager.engine.length(seq),
        manager.engine.choose(seq),
        manager.engine.propose(seq),
    )
    turn(manager, session, seq, 2, 60)
    session.close()
    fork = manager.fork(session.id, length=length)
    other = SessionManager(manager.store, drafting(folder))
    resumed, result = other.resume(other.open(fork.id))
    assert (result.reason, result.restored, result.draft) == (Reason.EXACT, length, "restored")
    other.engine.set_pending(resumed, pending)
    assert other.engine.propose(resumed) == guesses != ()

"""Kill -9 at any moment of a save loop: the session opens at the old turn or the new one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from engine.runner import Engine
from engine.speculative.model_drafter import ModelDrafter
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.stores.disk import DiskStore
from tests.sessions.conftest import MakeEngine
from tests.tiny import write_tiny

POLICY = Policy(lease=0.15, grace=0.2)
TURN = 37


def save_forever(engine: Engine, root: Path, session_id: str, acks: int) -> None:
    """Resume the session and save turn after turn, telling the length of each once it is acknowledged."""
    manager = SessionManager(DiskStore(root, "default"), engine, POLICY)
    session = manager.open(session_id)
    seq, _ = manager.resume(session)
    words = engine.tokenizer.encode("the quick brown fox jumps over the lazy dog, again")
    while True:
        if engine.length(seq) > 1500:
            engine.rewind(seq, 100)
            session.cut(100)
        engine.feed(seq, words[:TURN])
        engine.set_pending(seq, words[TURN])
        engine.propose(seq)  # for this a drafter, where there is one, reads along
        manager.save(session, seq, ())
        os.write(acks, engine.length(seq).to_bytes(4, "little"))


def killed_after(engine: Engine, root: Path, session: str, seconds: float) -> int | None:
    """Run the loop in a process of its own and kill it. Returns the last acknowledged length."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_forever(engine, root, session, write)
        finally:
            os._exit(1)
    os.close(write)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as told:
        acks = told.read()
    return int.from_bytes(acks[-4:], "little") if acks else None


def first_save(engine: Engine, root: Path, session: str) -> float:
    """How long it takes from the start of the loop to its first acknowledged save, on this machine today."""
    read, write = os.pipe()
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        try:
            save_forever(engine, root, session, write)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        told.read(4)
        taken = time.perf_counter() - started
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return taken


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kills", "drafts"), [(200, False), (60, True)])
def test_hundreds_of_kills_lose_nothing(
    engine: Engine, make_engine: MakeEngine, tmp_path: Path, kills: int, drafts: bool
) -> None:
    if drafts:
        drafter = make_engine(write_tiny(tmp_path / "draft.gguf", seed=1))
        engine.speculate(ModelDrafter(drafter, engine), 2)
    root = tmp_path / "store"
    manager = SessionManager(DiskStore(root, "default"), engine, POLICY)
    session = manager.create()
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode("in the beginning " * 20))
    manager.save(session, seq, ())
    session.close()
    length, chance, orphans, moved = engine.length(seq), random.Random(20261129), 0, 0
    pace = first_save(engine, root, session.id)
    length = manager.manifest(session.id).length
    for _ in range(kills):
        time.sleep(POLICY.lease)  # the killed holder's lease ends by itself
        acknowledged = killed_after(engine, root, session.id, chance.uniform(0.1, 3) * pace)
        manifest = manager.manifest(session.id)
        now = manifest.length
        last = length if acknowledged is None else acknowledged
        assert now in (last, last + TURN, 100 + TURN), "neither the old turn nor the new one"
        if drafts and now != length:
            assert manifest.draft is not None
            assert manifest.draft.length == now, "the draft is of another turn"
        report = manager.check()
        assert report.clean, report.problems
        orphans += report.orphans
        moved += now != length
        length = now
        manager.collect(manager.plan_gc())
    assert moved > kills // 4, "most kills came before the first save: the test shows nothing"
    assert orphans > 0
    time.sleep(POLICY.grace)
    manager.collect(manager.plan_gc())
    assert manager.check().orphans == 0
    opened = manager.open(session.id)
    _, result = manager.resume(opened)
    opened.close()
    assert result.recomputed == 0
    assert result.draft == ("restored" if drafts else None)

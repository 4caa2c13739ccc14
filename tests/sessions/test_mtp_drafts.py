"""Drafts of a model's own layers, whose rows look ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.speculative.choice import Draft
from engine.state import DraftState, SeqId
from serialization.snapshot import read_state
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.stores.memory import MemoryStore
from tests.oracles import deepseek_v3_mtp
from tests.oracles.base import tokens

DEPTHS = 2
TEXT = tokens(5, 700)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    deepseek_v3_mtp.oracle(share=0.15, num_depths=DEPTHS).write(path)
    return path


MTP = Draft("mtp", 3)


def drafting(folder: Path, draft: Draft | None = MTP) -> Engine:
    """Deterministic, so that rows do not depend on when they were made."""
    settings = {"n_ctx": 1024, "num_cells": 4096, "num_seqs": 4, "threads": 1, "deterministic": True}
    kinds = {"dtype": "f32", "type_k": "f32", "type_v": "f32"}
    return load_engine(folder, EngineConfig.from_mapping({**settings, **kinds}), draft=draft)


def read(engine: Engine, seq: SeqId, ids: list[int]) -> None:
    engine.feed(seq, ids)
    engine.choose(seq)


def draft_of(engine: Engine, seq: SeqId) -> DraftState:
    draft = engine.snapshot(seq).draft
    assert draft is not None
    return draft


def rows(draft: DraftState) -> list[torch.Tensor]:
    return [torch.cat(pieces) for pieces in zip(*(run.parts for run in draft.rows), strict=True)]


def expect_same(mine: DraftState, theirs: DraftState) -> None:
    assert (mine.length, mine.ahead) == (theirs.length, theirs.ahead)
    assert all(torch.equal(*pair) for pair in zip(rows(mine), rows(theirs), strict=True))
    last = zip(mine.points[-1].parts, theirs.points[-1].parts, strict=True)
    assert all(torch.equal(*pair) for pair in last)


def test_it_comes_back_with_its_target(folder: Path) -> None:
    manager = SessionManager(MemoryStore(), drafting(folder))
    session, seq = manager.create(), manager.engine.create()
    read(manager.engine, seq, TEXT[:400])
    manager.save(session, seq, ())
    session.close()
    other = SessionManager(manager.store, drafting(folder))
    resumed, result = other.resume(other.open(session.id))
    assert (result.reason, result.draft, result.draft_restored) == (Reason.EXACT, "restored", 400)
    expect_same(draft_of(other.engine, resumed), draft_of(manager.engine, seq))
    for _ in range(6):
        assert other.engine.propose(resumed) == manager.engine.propose(seq)
        assert other.engine.step(resumed) == manager.engine.step(seq)


@pytest.mark.parametrize(("more", "told"), [(100, "restored"), (400, "rebuilt: of 600 tokens 400 were read")])
def test_what_was_read_without_it_in_between_it_makes_up_for_or_begins_anew(
    folder: Path, more: int, told: str
) -> None:
    manager = SessionManager(MemoryStore(), drafting(folder))
    session, seq = manager.create(), manager.engine.create()
    read(manager.engine, seq, TEXT[:200])
    manager.save(session, seq, ())
    session.close()
    between = SessionManager(manager.store, drafting(folder, None))
    again = between.open(session.id)
    seq, result = between.resume(again)
    assert result.draft == "unused: no drafter is in use"
    read(between.engine, seq, TEXT[200 : 200 + more])
    between.save(again, seq, ())
    again.close()
    other = SessionManager(manager.store, drafting(folder))
    seq, result = other.resume(other.open(session.id))
    assert (result.reason, result.recomputed) == (Reason.EXACT, 0)
    assert result.draft is not None
    assert result.draft.startswith(told)
    assert result.draft_restored == (200 if told == "restored" else 0)
    assert other.engine.step(seq)


@pytest.mark.parametrize("back", [255, 256, 257, 258])
@pytest.mark.parametrize("change", [0, 1], ids=["read again", "other text"])
def test_rows_that_saw_what_is_read_anew_are_not_kept(folder: Path, back: int, change: int) -> None:
    """At the border of a chunk its last rows are of tokens behind it."""
    manager = SessionManager(MemoryStore(), drafting(folder))
    session, seq = manager.create(), manager.engine.create()
    read(manager.engine, seq, TEXT[:600])
    manager.save(session, seq, ())
    first = manager.manifest(session.id).draft
    manager.engine.rewind(seq, back)
    session.cut(back)
    read(manager.engine, seq, [token ^ change for token in TEXT[back : back + 300]])
    manager.save(session, seq, ())
    session.close()
    manifest = manager.manifest(session.id)
    stored = read_state(manager.store, manifest).draft
    assert stored is not None
    expect_same(stored, draft_of(manager.engine, seq))
    assert first is not None
    assert manifest.draft is not None
    assert (manifest.draft.chunks[0] == first.chunks[0]) == (back >= 256 + DEPTHS)

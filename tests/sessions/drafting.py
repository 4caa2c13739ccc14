"""Engines that draft, and sessions that are saved with what their drafters know."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.runner import Engine
from engine.speculative.model_drafter import ModelDrafter
from engine.state import DraftState, PartKind, SeqId
from serialization.manifest import Manifest
from sessions.manager import SessionManager
from sessions.session import Session
from tests.exact.members import open_member

#: of every kind of memory that a draft can have: token rows, windows, point state, and all of it
DRAFTERS = ("qwen3", "gemma3", "mamba2", "recurrent_gemma")
CUTTABLE = ("qwen3",)
TEXT = [3 + (7 * at + at * at // 5) % 90 for at in range(2000)]
SETTINGS = {"n_ctx": 2048, "num_cells": 8192}


def plain() -> Engine:
    return open_member("llama", "f32", **SETTINGS)


def drafting(family: str = "qwen3", **settings: object) -> Engine:
    """A target whose drafter is a model of `family`."""
    engine = plain()
    engine.speculate(ModelDrafter(open_member(family, "f32", **{**SETTINGS, **settings}), engine), 3)
    return engine


def turn(engine: Engine, seq: SeqId, tokens: Sequence[int], steps: int = 4) -> None:
    """Read `tokens`, then say a little, which is when a drafter reads along."""
    engine.feed(seq, tokens)
    engine.choose(seq)
    for _ in range(steps):
        engine.step(seq)
    engine.mark(seq)


def saved(manager: SessionManager, count: int = 600) -> tuple[Session, SeqId]:
    seq, session = manager.engine.create(), manager.create()
    turn(manager.engine, seq, TEXT[:count])
    manager.save(session, seq, ())
    return session, seq


def draft_in(engine: Engine, seq: SeqId) -> DraftState:
    """What the engine's drafter keeps of the sequence."""
    draft = engine.snapshot(seq).draft
    assert draft is not None
    return draft


def manifest_of(manager: SessionManager, session: Session) -> Manifest:
    manifest = manager.manifest(session.id)
    assert (manifest.draft is not None) == ("draft" in manifest.features)
    return manifest


def draft_length(manifest: Manifest) -> int:
    return manifest.draft.length if manifest.draft else 0


def rows_of(draft: DraftState, kind: PartKind) -> list[torch.Tensor]:
    """All rows of every part of one kind."""
    runs = [run for run in draft.rows if run.kind is kind]
    return [torch.cat(pieces) for pieces in zip(*(run.parts for run in runs), strict=True)]


def same(mine: DraftState, theirs: DraftState) -> bool:
    """Whether both are one state, bit for bit. Of a window one may hold more rows than the other."""
    pairs = [
        (a[len(a) - min(len(a), len(b)) :], b[len(b) - min(len(a), len(b)) :])
        for kind in PartKind
        for a, b in zip(rows_of(mine, kind), rows_of(theirs, kind), strict=True)
    ]
    for a, b in zip(mine.points[-1:], theirs.points[-1:], strict=True):
        pairs += zip(a.parts, b.parts, strict=True)
    return mine.length == theirs.length and all(torch.equal(*pair) for pair in pairs)

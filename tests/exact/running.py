"""Live runs that are saved on their way, and restores that must go on as they did."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from engine.runner import Engine
from engine.state import SeqId, SequenceState
from serialization.manifest import Manifest
from serialization.snapshot import read_state
from sessions.manager import SessionManager

STEPS = 48


@dataclass(frozen=True, slots=True)
class Live:
    """A run of `tokens` one by one: the logits after each, and what was saved after the first n of them."""

    tokens: tuple[int, ...]
    logits: tuple[torch.Tensor, ...]
    saved: dict[int, Manifest]


def run_live(manager: SessionManager, tokens: Sequence[int], cuts: Collection[int]) -> Live:
    """Feed `tokens`, saving one session at each of `cuts`."""
    engine = manager.engine
    seq, session = engine.create(), manager.create()
    saved: dict[int, Manifest] = {}
    logits = []
    for at, token in enumerate(tokens):
        if at in cuts:
            manager.save(session, seq, ())
            assert session.manifest is not None
            saved[at] = session.manifest
        logits.append(step(engine, seq, token))
    session.close()
    forget(engine, seq)
    return Live(tuple(tokens), tuple(logits), saved)


def step(engine: Engine, seq: SeqId, token: int) -> torch.Tensor:
    """Logits after one more token."""
    engine.advance({seq: (token,)})
    logits = engine.logits(seq)
    assert logits is not None
    return logits.clone()


def go_on(engine: Engine, seq: SeqId, tokens: Sequence[int]) -> list[torch.Tensor]:
    return [step(engine, seq, token) for token in tokens]


def forget(engine: Engine, seq: SeqId) -> None:
    """Close it, and leave nothing in memory."""
    engine.rewind(seq, 0)
    engine.close(seq)


def restored(engine: Engine, manager: SessionManager, manifest: Manifest) -> SequenceState:
    """The state as the store gives it back, every digest checked."""
    return read_state(manager.store, manifest)


def first_difference(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> int | None:
    """At which step the bits differ first; None if they never do."""
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not torch.equal(a, b):
            return index
    return None


def failing_cuts(engine: Engine, manager: SessionManager, live: Live) -> dict[int, int]:
    """Cuts from which a restore into `engine` goes on otherwise than the live run did, and after how many
    steps."""
    failing = {}
    for cut, manifest in live.saved.items():
        seq = engine.restore(restored(engine, manager, manifest))
        assert engine.length(seq) == cut
        stop = min(cut + STEPS, len(live.tokens))
        difference = first_difference(go_on(engine, seq, live.tokens[cut:stop]), live.logits[cut:stop])
        if difference is not None:
            failing[cut] = difference
        forget(engine, seq)
    return failing

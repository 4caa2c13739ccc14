"""A real model goes on from a state that was stored anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import SeqId
from serialization.manifest import Manifest
from serialization.reencode.reencode import reencode
from serialization.reencode.reencoding import Reencoding
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.stores.memory import MemoryStore
from tests.text import long_text

pytestmark = pytest.mark.real

LENGTH = 300
STEPS = 12
#: How far logits move by a conversion from bf16. Reading the same ids anew with rows of that dtype moves them
#: by as much and more.
DRIFT = {"f32": 0.01, "q8_0": 1.0, "q4_0": 5.0}
#: Of the steps those, at least, at which the likeliest token is the same.
ALIKE = {"f32": 12, "q8_0": 11, "q4_0": 9}


def opened(model: Path, dtype: str) -> Engine:
    config = EngineConfig(n_ctx=1024, num_cells=4096, type_k=dtype, type_v=dtype, threads=1)
    return load_engine(model, config)


@pytest.fixture(scope="module")
def saved(smollm2_path: Path) -> tuple[SessionManager, Manifest, torch.Tensor]:
    """A session of a sequence that goes on live: the logits of its next steps."""
    engine = opened(smollm2_path, "bf16")
    manager = SessionManager(MemoryStore(), engine)
    session, seq = manager.create(), engine.create()
    engine.feed(seq, engine.tokenizer.encode(long_text())[:LENGTH])
    manager.save(session, seq, ())
    session.close()
    assert session.manifest is not None
    return manager, session.manifest, steps(engine, seq)


def steps(engine: Engine, seq: SeqId) -> torch.Tensor:
    """float32 [steps, vocab] behind the same tokens."""
    out = []
    for token in engine.tokenizer.encode(long_text())[LENGTH : LENGTH + STEPS]:
        engine.advance({seq: (token,)})
        logits = engine.logits(seq)
        assert logits is not None
        out.append(logits.clone())
    return torch.stack(out)


def gone_on(engine: Engine, store: MemoryStore, made: Manifest) -> torch.Tensor:
    manager = SessionManager(store, engine)
    manager.commits.begin(made, None, None, made.session)
    session = manager.open(made.session)
    seq, result = manager.resume(session)
    session.close()
    assert (result.reason, result.recomputed) == (Reason.EXACT, 0)
    return steps(engine, seq)


def test_without_loss_it_goes_on_bit_for_bit(
    saved: tuple[SessionManager, Manifest, torch.Tensor],
) -> None:
    """In small raw chunks, and from those in large ones that are packed."""
    manager, manifest, live = saved
    small, large = MemoryStore(), MemoryStore()
    made = reencode(manager.store, manifest, small, Reencoding(codec="raw", chunk_tokens=64))
    made = reencode(small, made, large, Reencoding(level=9, chunk_tokens=1024))
    assert torch.equal(gone_on(manager.engine, large, made), live)


@pytest.mark.parametrize("dtype", DRIFT)
def test_with_loss_it_drifts_no_further_than_that_dtype(
    saved: tuple[SessionManager, Manifest, torch.Tensor], smollm2_path: Path, dtype: str
) -> None:
    manager, manifest, live = saved
    store = MemoryStore()
    made = reencode(manager.store, manifest, store, Reencoding(dtype, dtype), manager.engine.form)
    logits = gone_on(opened(smollm2_path, dtype), store, made)
    moved = float((logits - live).abs().max())
    assert moved <= DRIFT[dtype]
    assert int((logits.argmax(-1) == live.argmax(-1)).sum()) >= ALIKE[dtype]
    (loss,) = made.reencoded
    assert loss.is_exact == (dtype == "f32")

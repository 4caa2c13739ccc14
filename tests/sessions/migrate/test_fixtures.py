"""Conversations that llama.cpp really had go on here as they did there.

Every state was written by llama.cpp with the token that was fed next, the logits after it, and the 24 tokens
that came of it. The two engines have other kernels, and llama.cpp quantizes what it multiplies with
quantized weights; so logits are apart by a drift, which is measured here and held to what was stated
(docs/foreign.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import NextLogits, Provenance, SeqId
from serialization.brought import Proven
from serialization.foreign.conversion import Fate
from serialization.foreign.detect import read_llama
from serialization.foreign.foreign_state import Rotation
from sessions.manager import SessionManager
from sessions.migrate.geometry import geometry_of
from sessions.migrate.imports import Imported, Wish, import_foreign
from sessions.migrate.proof import LIMIT
from sessions.stores.memory import MemoryStore
from tests.conftest import fetched
from tests.llama_states import NAMES, llama_state

pytestmark = pytest.mark.real

#: the largest difference of one logit, of the twenty best, between llama.cpp and this engine
DRIFT = 0.6
MODELS = {"SmolLM2-135M-Instruct.Q4_1.gguf": "smollm2", "gemma-3-270m-q4_k_m.gguf": "gemma3-270m"}

_engines: dict[tuple[str, str], Engine] = {}


def engine_of(said: dict[str, Any]) -> Engine:
    """With rows in the dtype of the file, so that they are what llama.cpp had."""
    key = said["model"], said["type_k"]
    if key not in _engines:
        config = EngineConfig(n_ctx=1024, threads=1, type_k=said["type_k"], type_v=said["type_v"])
        _engines[key] = load_engine(fetched(MODELS[said["model"]]), config)
    return _engines[key]


def logits(engine: Engine, seq: SeqId) -> torch.Tensor:
    edge = engine.edge(seq)
    assert isinstance(edge, NextLogits)
    return edge.logits


def imported(path: Path, said: dict[str, Any]) -> tuple[SessionManager, Imported]:
    engine = engine_of(said)
    manager = SessionManager(MemoryStore(), engine)
    return manager, import_foreign(manager, read_llama(path.read_bytes(), geometry_of(engine)), Wish())


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_of_llama_cpp_goes_on_as_it_did_there(name: str) -> None:
    path = llama_state(name)
    said = json.loads(path.with_suffix(".json").read_text())
    manager, result = imported(path, said)
    engine, examined = engine_of(said), result.examined
    assert examined.tokens == tuple(said["tokens"])
    assert examined.brought.proven is Proven.ROWS
    assert examined.proof is not None
    assert examined.proof.worst.drift < LIMIT / 2
    session = manager.open(result.session.id)
    seq, restored = manager.resume(session)
    session.close()
    assert (restored.restored, restored.recomputed) == (len(said["tokens"]), 0)
    assert {span.provenance for span in engine.spans(seq)} == {Provenance.IMPORTED}

    engine.feed(seq, [said["next_token"]])
    mine, theirs = logits(engine, seq), torch.tensor(said["top_logits"])
    drift = float((mine[said["top_ids"]] - theirs).abs().max())
    assert drift < DRIFT
    assert int(mine.argmax()) == said["top_ids"][0]
    # Of the twenty best none is missing but where it is within the drift of the twentieth.
    best = set(torch.topk(mine, 20).indices.tolist())
    last = float(theirs[-1])
    for token, value in zip(said["top_ids"], said["top_logits"], strict=True):
        assert token in best or value < last + 2 * DRIFT
    for token in best - set(said["top_ids"]):
        assert float(mine[token]) < last + DRIFT

    agreed = 0  # until both are as likely, within the drift
    for token in said["greedy_after"]:
        first, second = torch.topk(logits(engine, seq), 2).values.tolist()
        if int(logits(engine, seq).argmax()) != token:
            assert first - second <= DRIFT
            break
        agreed += 1
        engine.feed(seq, [token])
    assert agreed >= 9
    engine.rewind(seq, 0)
    engine.close(seq)


def test_what_rotation_quantized_rows_have_is_found_out() -> None:
    path = llama_state("smollm2-q8_0")
    said = json.loads(path.with_suffix(".json").read_text())
    _, result = imported(path, said)
    assert result.examined.rotation is Rotation.ROTATED
    keys, values = result.examined.conversion.changes
    assert (keys.fate, values.fate) == (Fate.CONVERTED, Fate.KEPT)
    assert 0 < keys.loss < 0.006

"""States go to llama.cpp and come from it, and each goes on where the other stopped. `make llama` runs this.

It is llama.cpp itself (in llama-cpp-python 0.3.36) that loads what is written here and writes what is read.
Kernels differ, so logits are apart by a drift; greedy tokens are the same as long as the first is likelier
than the second by more than that.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import NextLogits, SeqId
from serialization.brought import Proven
from serialization.foreign.detect import read_llama
from sessions.manager import SessionManager
from sessions.migrate.export import Shape, export_foreign
from sessions.migrate.geometry import geometry_of
from sessions.migrate.imports import Wish, import_foreign
from sessions.stores.memory import MemoryStore
from tests.conftest import fetched
from tests.sessions.migrate.llama_python import in_llama_cpp, llama_python
from tests.text import long_text
from tests.tiny import write_tiny

pytestmark = [pytest.mark.real, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Case:
    """`length` tokens of a text; `drift` is the largest difference of one of the twenty best logits."""

    model: str
    type_k: str = "f16"
    type_v: str = "f16"
    flash: bool = True
    length: int = 120
    drift: float = 0.6

    def __str__(self) -> str:
        flash = "" if self.flash else "-no-flash"
        return f"{self.model}-{self.type_k}-{self.type_v}{flash}-{self.length}"


CASES = [
    Case("smollm2"),
    Case("smollm2", flash=False),
    Case("smollm2", "f32", "f32"),
    Case("smollm2", "bf16", "bf16"),
    Case("smollm2", "q8_0", "q8_0"),
    Case("smollm2", "q5_0", "q5_0", drift=1.5),
    Case("smollm2", "q4_0", "q4_0", drift=3.0),
    Case("smollm2", "q8_0", "f16", flash=False),
    Case("smollm2", length=900),
    Case("gemma3-270m", length=700, drift=1.2),
    Case("gemma3-270m", length=700, flash=False, drift=1.2),
    Case("gemma3-270m", "q8_0", "q8_0", length=700, drift=1.2),
    Case("gemma3-270m", length=100, drift=1.2),
    Case("tiny-llama-128", drift=0.05),
    Case("tiny-llama-128", "q8_0", "q8_0", drift=0.05),
    Case("tiny-qwen2-32", drift=0.05),
    Case("tiny-qwen3", "q8_0", "q8_0", drift=0.05),
    Case("tiny-gemma3", length=400, drift=0.05),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    llama_python()

    @functools.cache
    def of(name: str) -> Path:
        if not name.startswith("tiny-"):
            return fetched(name)
        _, architecture, *head = name.split("-")
        size = int(head[0]) if head else 64
        return write_tiny(tmp_path_factory.mktemp("tiny") / f"{name}.gguf", architecture, layers=7, head=size)

    return of


def engine_of(case: Case, path: Path) -> Engine:
    config = EngineConfig(n_ctx=1024, threads=1, type_k=case.type_k, type_v=case.type_v, dtype="f32")
    return load_engine(path, config)


def text(engine: Engine, length: int) -> list[int]:
    """Ids of a text, without the blanks that it begins with."""
    return engine.tokenizer.encode(long_text())[100 : 100 + length]


def logits(engine: Engine, seq: SeqId) -> torch.Tensor:
    edge = engine.edge(seq)
    assert isinstance(edge, NextLogits)
    return edge.logits


def goes_on(engine: Engine, seq: SeqId, theirs: dict[str, Any], greedy: dict[str, Any], drift: float) -> str:
    """Whether what comes is what came in llama.cpp; the figures."""
    mine = logits(engine, seq)
    apart = float((mine[theirs["ids"]] - torch.tensor(theirs["logits"])).abs().max())
    assert apart < drift
    agreed = 0
    for token, gap in zip(greedy["ids"], greedy["gaps"], strict=True):
        first, second = torch.topk(logits(engine, seq), 2).values.tolist()
        if int(logits(engine, seq).argmax()) != token:
            assert min(gap, first - second) <= drift
            break
        agreed += 1
        engine.feed(seq, [token])
    return f"drift {apart:.3f}, {agreed} of {len(greedy['ids'])} tokens agree"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_session_goes_on_in_llama_cpp(case: Case, models: Callable[[str], Path], tmp_path: Path) -> None:
    path, out = models(case.model), tmp_path / "state.bin"
    engine = engine_of(case, path)
    manager = SessionManager(MemoryStore(), engine)
    seq = engine.create()
    engine.feed(seq, text(engine, case.length))
    pending = engine.choose(seq)
    session = manager.create("report")
    manager.save(session, seq, ())
    session.close()
    with out.open("wb") as file:
        shape = Shape(case.type_k, case.type_v, flash_attention=case.flash)
        told = export_foreign(engine, manager.store, manager.manifest("report"), file, "llama", shape)
    assert told.pending == pending
    steps = [["load", str(out)], ["feed", [pending]], ["top", 20], ["greedy", 24]]
    top, greedy = in_llama_cpp(path, case.type_k, case.type_v, case.flash, steps)
    engine.feed(seq, [pending])
    print(f"\nout {case}: loss {told.conversion.loss:.4f}, {goes_on(engine, seq, top, greedy, case.drift)}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_conversation_of_llama_cpp_goes_on_here(
    case: Case, models: Callable[[str], Path], tmp_path: Path
) -> None:
    path, saved = models(case.model), tmp_path / "state.bin"
    engine = engine_of(case, path)
    ids = text(engine, case.length + 1)
    steps = [["feed", ids[:-1]], ["save", str(saved)], ["feed", ids[-1:]], ["top", 20], ["greedy", 24]]
    top, greedy = in_llama_cpp(path, case.type_k, case.type_v, case.flash, steps)
    manager = SessionManager(MemoryStore(), engine)
    result = import_foreign(manager, read_llama(saved.read_bytes(), geometry_of(engine)), Wish("report"))
    proof = result.examined.proof
    assert proof is not None
    assert result.examined.brought.proven is Proven.ROWS
    session = manager.open("report")
    seq, restored = manager.resume(session)
    session.close()
    assert restored.restored == case.length
    engine.feed(seq, ids[-1:])
    figures = goes_on(engine, seq, top, greedy, case.drift)
    loss = result.examined.conversion.loss
    print(f"\nin {case}: loss {loss:.4f}, proof {proof.worst.drift:.3f} of {proof.limit}, {figures}")


@pytest.mark.parametrize(
    ("format", "step"), [("llama", "load"), ("llama-session", "session"), ("llama-blob", "set")]
)
def test_every_container_is_loaded(
    format: str, step: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """A blob says nothing of its ids, and after the others the last token can be asked again."""
    case, out = Case("smollm2"), tmp_path / "state.bin"
    path = models(case.model)
    engine = engine_of(case, path)
    manager = SessionManager(MemoryStore(), engine)
    seq = engine.create()
    engine.feed(seq, text(engine, case.length))
    session = manager.create("report")
    manager.save(session, seq, ())
    session.close()
    with out.open("wb") as file:
        told = export_foreign(engine, manager.store, manager.manifest("report"), file, format)
    assert told.pending is None
    last = engine.tokens(seq)[-1]
    again = [["again"]] if format != "llama-blob" else [["feed", [engine.choose(seq)]]]
    (top,) = in_llama_cpp(path, "f16", "f16", True, [[step, str(out)], *again, ["top", 20]])
    if format == "llama-blob":
        engine.feed(seq, [engine.choose(seq)])
    apart = (logits(engine, seq)[top["ids"]] - torch.tensor(top["logits"])).abs().max()
    assert float(apart) < case.drift
    assert last in engine.tokens(seq)


def test_what_llama_cpp_saves_again_is_what_it_was_given(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    case, ours, theirs = (
        Case("gemma3-270m", length=700, drift=1.2),
        tmp_path / "ours.bin",
        tmp_path / "theirs.bin",
    )
    path = models(case.model)
    engine = engine_of(case, path)
    manager = SessionManager(MemoryStore(), engine)
    seq = engine.create()
    engine.feed(seq, text(engine, case.length))
    session = manager.create("report")
    manager.save(session, seq, ())
    session.close()
    with ours.open("wb") as file:
        export_foreign(engine, manager.store, manager.manifest("report"), file, "llama")
    in_llama_cpp(path, "f16", "f16", True, [["load", str(ours)], ["save", str(theirs)]])
    assert theirs.read_bytes() == ours.read_bytes()


def test_a_state_in_memory_is_read_as_the_file_is(models: Callable[[str], Path], tmp_path: Path) -> None:
    case, file, blob = Case("smollm2"), tmp_path / "state.bin", tmp_path / "state.blob"
    path = models(case.model)
    engine = engine_of(case, path)
    ids = text(engine, case.length)
    in_llama_cpp(path, "f16", "f16", True, [["feed", ids], ["save", str(file)], ["blob", str(blob)]])
    geometry = geometry_of(engine)
    a, b = (read_llama(each.read_bytes(), geometry) for each in (file, blob))
    assert b.tokens is None
    assert all(torch.equal(x.data, y.data) for x, y in zip(a.caches[0].rows, b.caches[0].rows, strict=True))
    manager = SessionManager(MemoryStore(), engine)
    assert import_foreign(manager, b, Wish("report", tokens=tuple(ids))).examined.proof is not None


def test_the_bytes_of_io_are_what_a_file_gets(models: Callable[[str], Path]) -> None:
    engine = engine_of(Case("tiny-llama"), models("tiny-llama"))
    manager = SessionManager(MemoryStore(), engine)
    seq = engine.create()
    engine.feed(seq, (1, 2, 3))
    session = manager.create("report")
    manager.save(session, seq, ())
    session.close()
    out = io.BytesIO()
    told = export_foreign(engine, manager.store, manager.manifest("report"), out, "llama")
    assert told.nbytes == len(out.getvalue())

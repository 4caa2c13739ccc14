"""What verify says of stored rows: sound where the model says the same, drifted where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import FingerprintMismatch, NoCheckpoint, UsageError
from engine.runner import Engine
from engine.state import Rows, SequenceState
from serialization.blobs import Store
from serialization.manifest import Manifest
from serialization.snapshot import read_state, write_state
from sessions.drift import Drift, drift_of
from sessions.manager import SessionManager
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.verify import Verification, verify
from tests.exact.members import open_member
from tests.sessions.conftest import MakeEngine
from tests.tiny import write_tiny

LIMIT = 3.0


def saved(engine: Engine, store: Store, length: int, turns: int = 1, pending: bool = True) -> Manifest:
    """A session of `length` tokens in as many saves as `turns`, the last token of each pending or not."""
    manager, seq = SessionManager(store, engine), engine.create()
    tokens = [(7 * i + i // 5) % 90 + 5 for i in range(length)]
    session = manager.create()
    for turn in range(turns):
        engine.feed(seq, tokens[length * turn // turns : length * (turn + 1) // turns])
        if pending:
            engine.choose(seq)
        engine.mark(seq)
        manager.save(session, seq, ())
    session.close()
    engine.close(seq)
    return manager.manifest(session.id)


def altered(store: Store, manifest: Manifest, change: Callable[[torch.Tensor], None]) -> Manifest:
    """The same turn with other rows in its first part, as a kernel that computes otherwise would make it."""
    state = read_state(store, manifest)
    runs = []
    for run in state.rows:
        first = run.parts[0].clone()
        change(first)
        runs.append(Rows(run.kind, run.start, run.stop, (first, *run.parts[1:])))
    other: SequenceState = replace(state, rows=tuple(runs))
    written = write_state(store, other, None, 0)
    return replace(manifest, chunks=written.chunks, checkpoints=written.checkpoints, edge=written.edge)


def ask(engine: Engine, store: Store, manifest: Manifest, count: int = 3, seed: int = 0) -> Verification:
    return verify(engine, store, manifest, count, LIMIT, seed)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_rows_that_the_model_made_are_sound(make_engine: MakeEngine, store: DiskStore, dtype: str) -> None:
    maker = make_engine(type_k=dtype, type_v=dtype)
    manifest = saved(maker, store, 700)
    found = ask(make_engine(type_k=dtype, type_v=dtype), store, manifest)
    assert not found.drifted
    assert len(found.samples) == 3
    assert all(sample.agrees for sample in found.samples)
    assert found.rows.num_values == 700 * 2 * 64 * 3
    assert [part.num_rows for part in found.parts] == [700] * 6
    assert found.recorded is not None
    assert found.recorded.max < 0.5


def test_every_row_is_compared_and_equal_work_gives_equal_bits(
    make_engine: MakeEngine, store: DiskStore
) -> None:
    """A deterministic engine computes the same bits however tokens are batched."""
    manifest = saved(make_engine(deterministic=True), store, 600)
    found = ask(make_engine(deterministic=True), store, manifest, count=5)
    assert found.rows == Drift(0.0, 0.0, 600 * 2 * 64 * 3, 0)
    assert {sample.logits.num_differing for sample in found.samples} == {0}
    assert found.recorded is not None
    assert found.recorded.num_differing == 0


def test_rows_of_another_meaning_are_drift_though_every_digest_is_right(
    engine: Engine, make_engine: MakeEngine, store: DiskStore
) -> None:
    manifest = altered(store, saved(engine, store, 300), scaled)
    found = ask(make_engine(), store, manifest, count=8)
    assert found.drifted
    parts = {part.name: part.drift for part in found.parts}
    (first, *others) = parts.values()
    assert first.num_differing > 0.9 * first.num_values
    assert first.max > 100 * max(other.max for other in others)


def test_a_row_that_is_no_number_is_drift(engine: Engine, make_engine: MakeEngine, store: DiskStore) -> None:
    def spoiled(rows: torch.Tensor) -> None:
        rows.view(torch.bfloat16)[0, 0] = math.nan

    found = ask(make_engine(), store, altered(store, saved(engine, store, 100), spoiled))
    assert found.drifted
    assert math.isnan(found.rows.max)


def test_windows_are_asked_where_their_rows_are_kept(
    windowed_path: Path, make_engine: MakeEngine, store: DiskStore
) -> None:
    manifest = saved(make_engine(windowed_path), store, 900, turns=3)
    found = ask(make_engine(windowed_path), store, manifest, count=50)
    assert not found.drifted
    assert all(sample.agrees for sample in found.samples)
    windows = [part for part in found.parts if part.kind == "window"]
    assert len(windows) == 12
    assert all(32 <= part.num_rows <= 900 for part in windows)


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "deepseek_v4", "recurrent_gemma"])
def test_recurrent_models_are_asked_at_their_checkpoints(family: str) -> None:
    store = MemoryStore()
    manifest = saved(open_member(family, "f32"), store, 90, turns=3)
    found = ask(open_member(family, "f32"), store, manifest, count=9)
    assert [sample.length for sample in found.samples] == [30, 60, 90]
    assert not found.drifted
    assert all(sample.agrees for sample in found.samples)
    points = [part for part in found.parts if part.kind == "point"]
    assert points
    assert {part.num_rows for part in points} == {3}


def test_logits_that_were_stored_are_compared_where_nothing_is_pending(
    engine: Engine, make_engine: MakeEngine, store: DiskStore
) -> None:
    manifest = saved(engine, store, 60, pending=False)
    found = ask(make_engine(), store, manifest, count=100)
    assert len(found.samples) == 59  # nobody knows what follows the last
    assert found.recorded is not None
    assert found.recorded.num_values == engine.tokenizer.vocab_size
    assert found.parts[0].num_rows == 60


def test_lengths_are_drawn_by_the_seed_alone(
    engine: Engine, make_engine: MakeEngine, store: DiskStore
) -> None:
    manifest = saved(engine, store, 200)

    def lengths(seed: int) -> list[int]:
        found = ask(make_engine(), store, manifest, count=5, seed=seed)
        assert found.num_lengths == 200
        return [sample.length for sample in found.samples]

    assert lengths(1) == lengths(1) != lengths(2)


def scaled(rows: torch.Tensor) -> None:
    rows.view(torch.bfloat16).mul_(-3)


def test_nothing_of_what_is_in_question_stays_in_the_engine(
    engine: Engine, make_engine: MakeEngine, store: DiskStore
) -> None:
    manifest, asked = altered(store, saved(engine, store, 300), scaled), make_engine()
    for _ in range(10):  # more than there are sequences
        assert ask(asked, store, manifest).drifted
        assert asked.known_prefix(manifest.tokens) == 0


def test_tokens_are_read_anew_though_memory_knows_them(
    engine: Engine, make_engine: MakeEngine, store: DiskStore
) -> None:
    """Rows in memory may be the stored ones: they prove nothing."""
    manifest, asked = altered(store, saved(engine, store, 300), scaled), make_engine()
    asked.close(asked.restore(read_state(store, manifest)))
    assert asked.known_prefix(manifest.tokens) == 299
    found = ask(asked, store, manifest, count=1)
    assert found.samples[0].length > 150  # so much could have been shared
    first = found.parts[0].drift
    assert first.num_differing > 0.9 * first.num_values


def test_rows_behind_a_context_shift_are_not_asked(make_engine: MakeEngine, store: DiskStore) -> None:
    engine = make_engine()
    manager, seq = SessionManager(store, engine), engine.create()
    engine.feed(seq, [i % 90 + 5 for i in range(400)])
    engine.shift(seq, 100, 50)
    session = manager.create()
    manager.save(session, seq, ())
    session.close()
    found = ask(make_engine(), store, manager.manifest(session.id), count=1000)
    assert found.samples[-1].length == 100
    assert found.recorded is None
    assert "shifted" in found.unasked[0]
    assert not found.drifted


def test_there_must_be_rows_to_verify(engine: Engine, store: DiskStore) -> None:
    manager = SessionManager(store, engine)
    manifest = saved(engine, store, 50)
    manager.release_rows(manifest.session)
    with pytest.raises(NoCheckpoint, match="no stored rows"):
        ask(engine, store, manager.manifest(manifest.session))
    with pytest.raises(UsageError):
        ask(engine, store, manifest, count=0)


def test_another_model_is_refused_by_the_field(
    engine: Engine, make_engine: MakeEngine, store: DiskStore, tmp_path: Path
) -> None:
    manifest = saved(engine, store, 50)
    other = make_engine(write_tiny(tmp_path / "other.gguf", seed=5))
    with pytest.raises(FingerprintMismatch, match="weights"):
        ask(other, store, manifest)


def test_drift_adds_up() -> None:
    a, b = torch.tensor([1.0, 2.0, math.inf]), torch.tensor([1.0, 4.0, math.inf])
    assert drift_of(a, b) == Drift(2.0, 2 / 3, 3, 1)
    assert drift_of(a, b) + Drift() == Drift() + drift_of(a, b) == drift_of(a, b)
    assert drift_of(a, b) + Drift(5.0, 1.0, 1, 1) == Drift(5.0, 0.75, 4, 2)
    nan = Drift(math.nan, math.nan, 1, 1)
    for sum_ in (nan + Drift(9.0, 9.0, 1, 1), Drift(9.0, 9.0, 1, 1) + nan):
        assert math.isnan(sum_.max)
        assert not sum_.within(100.0)

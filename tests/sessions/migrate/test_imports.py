"""A conversation of another system becomes a session whole and proven, or nothing is there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from engine.errors import (
    ContextFull,
    Corrupt,
    FingerprintMismatch,
    SessionExists,
    StoreFull,
    Unproven,
    UsageError,
)
from engine.runner import Engine
from engine.state import NextLogits, Pending, Provenance, SeqId, Span
from serialization.brought import Brought, Proven
from serialization.chunks import CHUNK_TOKENS
from serialization.foreign.conversion import Fate
from serialization.foreign.foreign_state import ForeignState, Rotation
from serialization.foreign.outward import Wanted, to_foreign
from serialization.manifest import Manifest, ManifestKind
from sessions.manager import SessionManager
from sessions.migrate.geometry import geometry_of, target_of
from sessions.migrate.imports import Taking, Wish, examine, import_foreign, row_types
from sessions.stores.memory import MemoryStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.migrate.files import changed, fed, foreign_of, ids
from tests.tiny import write_tiny

TOKENS = ids(50)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(type_k="f32", type_v="f32")


@pytest.fixture
def windowed(make_engine: MakeEngine, windowed_path: Path) -> Engine:
    return make_engine(windowed_path, type_k="f32", type_v="f32")


@pytest.fixture
def manager(engine: Engine) -> SessionManager:
    return SessionManager(MemoryStore(), engine)


def resumed(manager: SessionManager, name: str = "report") -> SeqId:
    session = manager.open(name)
    seq, _ = manager.resume(session)
    session.close()
    return seq


def logits(engine: Engine, seq: SeqId) -> torch.Tensor:
    edge = engine.edge(seq)
    assert isinstance(edge, NextLogits)
    return edge.logits


def said(engine: Engine, seq: SeqId, count: int = 12) -> list[int]:
    return [piece.token for piece in engine.generate(seq, max_tokens=count) if piece.token is not None]


# --- what comes of it -------------------------------------------------------------------------------


def test_it_goes_on_as_where_it_came_from(manager: SessionManager, engine: Engine) -> None:
    live = fed(engine, TOKENS)
    result = import_foreign(manager, foreign_of(engine, TOKENS), Wish("report", title="A report"))
    seq = resumed(manager)
    assert engine.tokens(seq) == TOKENS
    assert torch.allclose(logits(engine, seq), logits(engine, live), atol=1e-4)
    assert said(engine, seq) == said(engine, live)
    assert (result.session.name, result.session.title) == ("report", "A report")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_its_rows_are_those_of_the_file_bit_for_bit(make_engine: MakeEngine, dtype: str) -> None:
    engine = make_engine(type_k=dtype, type_v=dtype)
    manager = SessionManager(MemoryStore(), engine)
    state = foreign_of(engine, TOKENS, dtype, dtype)
    assert import_foreign(manager, state, Wish("report")).examined.conversion.exact
    rows = engine.snapshot(resumed(manager)).rows
    wanted = Wanted(dtype, dtype)
    back, _ = to_foreign("us", target_of(engine), geometry_of(engine), rows, TOKENS, wanted)
    pairs = zip(back.caches[0].rows, state.caches[0].rows, strict=True)
    assert all(torch.equal(mine.data, theirs.data) for mine, theirs in pairs)


def test_the_session_says_where_it_came_from_and_how_it_was_proven(
    manager: SessionManager, engine: Engine
) -> None:
    examined = import_foreign(manager, foreign_of(engine, TOKENS), Wish("report")).examined
    assert examined.proof is not None
    assert examined.proof.num_rows == 8
    brought = manager.manifest("report").brought
    assert brought == Brought(brought.source if brought else "", Proven.ROWS, 0.0, examined.proof.worst.drift)
    assert brought is not None
    assert "layout" in brought.source


def test_it_has_a_canary_for_engines_to_come(manager: SessionManager, engine: Engine) -> None:
    import_foreign(manager, foreign_of(engine, TOKENS), Wish("report"))
    canary = manager.manifest("report").canary
    assert canary is not None
    assert canary.position == 49
    assert engine.canary_drift(resumed(manager), canary) < 1e-4


def test_values_that_the_cache_cannot_say_are_not_taken_the_ids_are_read(make_engine: MakeEngine) -> None:
    engine = make_engine(type_k="f16", type_v="f16")
    state = foreign_of(engine, TOKENS)
    state.caches[0].rows[0].data[3].view(torch.float32)[:] = 1e6
    examined = examine(engine, state, Wish())
    assert examined.brought.proven is Proven.REREAD
    (dropped,) = examined.conversion.of(Fate.DROPPED)
    assert "cannot say" in dropped.why


def test_what_the_file_had_no_rows_of_is_read(manager: SessionManager, engine: Engine) -> None:
    examined = import_foreign(
        manager, foreign_of(engine, TOKENS[:40]), Wish("report", tokens=TOKENS)
    ).examined
    assert examined.num_read == 10
    spans = (Span(0, 40, Provenance.IMPORTED), Span(40, 50, Provenance.COMPUTED))
    assert manager.manifest("report").spans == spans
    assert said(engine, resumed(manager)) == said(engine, fed(engine, TOKENS))


def test_ids_can_be_named_for_a_file_that_has_none(manager: SessionManager, engine: Engine) -> None:
    state = changed(foreign_of(engine, TOKENS), tokens=None)
    with pytest.raises(UsageError, match="no token ids"):
        import_foreign(manager, state, Wish("report"))
    import_foreign(manager, state, Wish("report", tokens=TOKENS))
    assert manager.manifest("report").tokens == TOKENS


def test_another_dtype_is_taken_with_its_loss(make_engine: MakeEngine, engine: Engine) -> None:
    quantized = make_engine(type_k="q8_0", type_v="bf16")
    manager = SessionManager(MemoryStore(), quantized)
    examined = import_foreign(manager, foreign_of(engine, TOKENS), Wish("report")).examined
    brought = manager.manifest("report").brought
    assert brought is not None
    assert 1e-3 < brought.loss == examined.conversion.loss < 1e-2
    assert {change.fate for change in examined.conversion.changes} == {Fate.CONVERTED}


def test_an_engine_can_be_asked_to_keep_rows_as_they_are(engine: Engine) -> None:
    assert row_types(foreign_of(engine, TOKENS, "q8_0", "f16")) == {"type_k": "q8_0", "type_v": "f16"}


@pytest.mark.parametrize("rotation", [Rotation.ROTATED, Rotation.NONE])
def test_whether_rows_were_rotated_is_found_out(make_engine: MakeEngine, rotation: Rotation) -> None:
    engine = make_engine(type_k="q8_0", type_v="q8_0")
    state = foreign_of(engine, TOKENS, "q8_0", "q8_0", rotation)
    assert state.rotation is Rotation.UNKNOWN
    assert examine(engine, state, Wish()).rotation is rotation
    wrong = Rotation.NONE if rotation is Rotation.ROTATED else Rotation.ROTATED
    with pytest.raises(Unproven):
        examine(engine, state, Wish(rotation=wrong))


def test_windows_of_which_the_file_has_only_what_is_seen(windowed: Engine) -> None:
    manager, tokens = SessionManager(MemoryStore(), windowed), ids(90)
    examined = import_foreign(manager, foreign_of(windowed, tokens), Wish("report")).examined
    assert examined.proof is not None
    assert examined.proof.num_rows == 1  # the one before would see a row that is not there
    live = fed(windowed, tokens)
    seq = resumed(manager)
    assert torch.allclose(logits(windowed, seq), logits(windowed, live), atol=1e-4)
    assert said(windowed, seq) == said(windowed, live)


def test_windows_that_are_not_full_yet_are_proven_by_as_many_rows_as_others(windowed: Engine) -> None:
    examined = examine(windowed, foreign_of(windowed, ids(20)), Wish())
    assert examined.proof is not None
    assert examined.proof.num_rows == 8


def test_a_conversation_shorter_than_the_proof_is_read_whole_for_it(engine: Engine) -> None:
    examined = examine(engine, foreign_of(engine, TOKENS[:3]), Wish())
    assert examined.proof is not None
    assert examined.proof.num_rows == 3


# --- what is not shared -----------------------------------------------------------------------------


def test_imported_rows_are_no_prefix_of_anothers_conversation(make_engine: MakeEngine) -> None:
    engine = make_engine(type_k="f32", type_v="f32")
    manager, tokens = SessionManager(MemoryStore(), engine), ids(2 * CHUNK_TOKENS + 9)
    import_foreign(manager, foreign_of(engine, tokens), Wish("report"))
    assert manager.known_prefix(tokens) is None
    assert engine.known_prefix(tokens) == 0
    seq = fed(engine, tokens)
    session = manager.create("own")
    manager.save(session, seq, ())
    session.close()
    hit = manager.known_prefix(tokens)
    assert hit is not None
    assert hit.session == session.id


def test_after_a_resume_they_are_none_either(manager: SessionManager, engine: Engine) -> None:
    import_foreign(manager, foreign_of(engine, TOKENS), Wish("report"))
    engine.close(resumed(manager))
    assert engine.known_prefix((*TOKENS, 1)) == 0


# --- what is refused --------------------------------------------------------------------------------


def nothing_is_there(manager: SessionManager, engine: Engine) -> bool:
    """No session, no name, and no sequence in use."""
    manager.create("report").close()
    seqs = [engine.create() for _ in range(engine.config.num_seqs)]
    for seq in seqs:
        engine.close(seq)
    return manager.list() == []


def test_rows_of_another_model_are_refused_with_the_layer_that_tells(
    make_engine: MakeEngine, engine: Engine, manager: SessionManager, tmp_path: Path
) -> None:
    other = make_engine(write_tiny(tmp_path / "other.gguf", seed=1), type_k="f32", type_v="f32")
    with pytest.raises(Unproven, match=r"kv\.[kv]\.0\d is off by \d\.\d\d of its size") as raised:
        import_foreign(manager, foreign_of(other, TOKENS), Wish("report"))
    assert raised.value.exit_code == 38
    assert float(str(raised.value.details["drift"])) > 0.3
    assert nothing_is_there(manager, engine)


def test_another_base_of_rope_is_another_model(
    make_engine: MakeEngine, manager: SessionManager, tmp_path: Path
) -> None:
    stretched = write_tiny(tmp_path / "stretched.gguf", rope_base=1e6)
    other = make_engine(stretched, type_k="f32", type_v="f32")
    with pytest.raises(Unproven):
        import_foreign(manager, foreign_of(other, TOKENS), Wish("report"))


def test_ids_that_the_rows_are_not_of_are_refused(manager: SessionManager, engine: Engine) -> None:
    with pytest.raises(Unproven):
        import_foreign(manager, foreign_of(engine, TOKENS), Wish("report", tokens=ids(50, seed=4)))
    assert nothing_is_there(manager, engine)


@pytest.mark.parametrize("tensor", [0, 5])
def test_rows_that_are_no_numbers_are_refused(manager: SessionManager, engine: Engine, tensor: int) -> None:
    state = foreign_of(engine, TOKENS)
    state.caches[0].rows[tensor].data[-1].view(torch.float32)[:] = torch.nan
    with pytest.raises(Unproven, match="nan"):
        import_foreign(manager, state, Wish("report"))
    assert nothing_is_there(manager, engine)


@pytest.mark.parametrize(
    ("tokens", "error", "said"),
    [
        (TOKENS[:-1], UsageError, "49 token ids for rows of 50 tokens"),
        ((*TOKENS[:-1], 9999), Corrupt, "outside of the model's vocabulary"),
        ((*TOKENS[:-1], -1), Corrupt, "outside of the model's vocabulary"),
    ],
)
def test_ids_that_cannot_be_are_refused(
    manager: SessionManager, engine: Engine, tokens: tuple[int, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        import_foreign(manager, foreign_of(engine, TOKENS), Wish("report", tokens=tokens))
    assert nothing_is_there(manager, engine)


def test_more_than_the_context_is_refused(make_engine: MakeEngine, engine: Engine) -> None:
    small = make_engine(type_k="f32", type_v="f32", n_ctx=32)
    manager = SessionManager(MemoryStore(), small)
    with pytest.raises(ContextFull):
        import_foreign(manager, foreign_of(engine, TOKENS), Wish("report"))
    assert nothing_is_there(manager, small)


def test_a_model_of_another_shape_is_refused(
    make_engine: MakeEngine, manager: SessionManager, tmp_path: Path
) -> None:
    longer = make_engine(write_tiny(tmp_path / "longer.gguf", layers=2), type_k="f32", type_v="f32")
    with pytest.raises(FingerprintMismatch):
        import_foreign(manager, foreign_of(longer, TOKENS), Wish("report"))


def test_a_name_that_is_taken_is_refused(manager: SessionManager, engine: Engine) -> None:
    import_foreign(manager, foreign_of(engine, TOKENS), Wish("report"))
    with pytest.raises(SessionExists):
        import_foreign(manager, foreign_of(engine, TOKENS), Wish("report"))
    assert len(manager.list()) == 1


def test_a_save_that_fails_leaves_nothing(
    manager: SessionManager, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFull("no room")

    with monkeypatch.context() as patched:
        patched.setattr(manager.store, "put", full)
        with pytest.raises(StoreFull):
            import_foreign(manager, foreign_of(engine, TOKENS), Wish("report"))
    assert nothing_is_there(manager, engine)


# --- without a proof --------------------------------------------------------------------------------


@pytest.mark.parametrize("taking", [Taking.PROVEN, Taking.TRUSTED])
def test_rows_of_which_no_numbers_come_are_refused_though_the_last_ones_are_proven(
    manager: SessionManager, engine: Engine, taking: Taking
) -> None:
    state = foreign_of(engine, TOKENS)
    state.caches[0].rows[-1].data[0].view(torch.float32)[:] = torch.nan  # the last layer's values
    with pytest.raises(Corrupt, match="no numbers"):
        import_foreign(manager, state, Wish("report", taking=taking))
    assert list(manager.list()) == []


@pytest.fixture
def trusted(
    make_engine: MakeEngine, manager: SessionManager, tmp_path: Path
) -> tuple[SessionManager, ForeignState]:
    other = make_engine(write_tiny(tmp_path / "other.gguf", seed=1), type_k="f32", type_v="f32")
    state = foreign_of(other, TOKENS)
    import_foreign(manager, state, Wish("report", taking=Taking.TRUSTED))
    return manager, state


def proven(manifest: Manifest) -> Proven | None:
    return None if manifest.brought is None else manifest.brought.proven


def test_what_is_trusted_says_so_for_ever(trusted: tuple[SessionManager, ForeignState]) -> None:
    manager, state = trusted
    assert proven(manager.manifest("report")) is Proven.UNVERIFIED
    assert examine(manager.engine, state, Wish(taking=Taking.TRUSTED)).proof is None
    session = manager.open("report")
    seq, restored = manager.resume(session)
    assert restored.detail.startswith("nobody verified the rows of llama.cpp")
    manager.engine.feed(seq, (1, 2, 3))
    manager.save(session, seq, ())
    session.close()
    assert manager.manifest("report").generation == 2
    assert proven(manager.manifest("report")) is Proven.UNVERIFIED
    fork = manager.fork("report", "fork")
    assert proven(manager.manifest(fork.id)) is Proven.UNVERIFIED
    manager.pin("report", "kept")
    assert proven(manager.manifest(manager.load("kept").id)) is Proven.UNVERIFIED
    out = io.BytesIO()
    manager.export("report", out)
    out.seek(0)
    assert proven(manager.manifest(manager.import_(out).id)) is Proven.UNVERIFIED


def test_a_session_that_is_gone_says_nothing_of_it(trusted: tuple[SessionManager, ForeignState]) -> None:
    manager, _ = trusted
    written = []
    put = manager.store.put
    manager.store.put = lambda kind, data: (written.append(bytes(data)), put(kind, data))[1]  # type: ignore[method-assign]
    manager.delete("report")
    (tomb,) = [Manifest.decode(data) for data in written]
    assert tomb.kind is ManifestKind.TOMBSTONE
    assert tomb.brought is None


def test_rows_can_be_left_and_the_ids_read_instead(manager: SessionManager, engine: Engine) -> None:
    wish = Wish("report", taking=Taking.REREAD)
    progress: list[tuple[int, int]] = []
    result = import_foreign(
        manager, foreign_of(engine, TOKENS), wish, lambda done, total: progress.append((done, total))
    )
    manifest = manager.manifest("report")
    assert result.examined.num_read == 50
    assert progress[-1] == (50, 50)
    assert proven(manifest) is Proven.REREAD
    assert {span.provenance for span in manifest.spans} == {Provenance.COMPUTED}


def test_a_file_without_rows_is_read_by_its_ids(manager: SessionManager, engine: Engine) -> None:
    state = foreign_of(engine, TOKENS)
    import_foreign(manager, changed(state, caches=()), Wish("report"))
    assert proven(manager.manifest("report")) is Proven.REREAD


def test_nothing_at_all_is_refused(manager: SessionManager) -> None:
    with pytest.raises(UsageError, match="neither tokens nor rows"):
        import_foreign(manager, ForeignState("a test", "", (), ()), Wish("report"))


def test_what_follows_can_be_pending(manager: SessionManager, engine: Engine) -> None:
    """An import computes what is behind the rows; nothing is left pending."""
    import_foreign(manager, foreign_of(engine, TOKENS[:-1]), Wish("report", tokens=TOKENS))
    assert not isinstance(manager.manifest("report").edge, Pending)

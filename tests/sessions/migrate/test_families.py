"""What each family remembers, as other systems have it; and those whose rows are not taken or written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from engine.errors import Unsupported, UsageError
from engine.runner import Engine
from engine.state import Provenance
from serialization.brought import Proven
from serialization.foreign.foreign_state import (
    ForeignPoint,
    ForeignRows,
    ForeignState,
    Rotation,
    Tensor,
    ValueOrder,
)
from serialization.foreign.geometry import (
    CacheRole,
    CellExtension,
    LayerRows,
    Pairing,
    RecurrentCache,
    RowsCache,
    StateLayer,
    Window,
)
from sessions.manager import SessionManager
from sessions.migrate.export import export_foreign
from sessions.migrate.geometry import geometry_of, own_geometry_of
from sessions.migrate.imports import Taking, Wish, import_foreign
from sessions.stores.memory import MemoryStore
from tests.exact.members import open_member
from tests.sessions.conftest import MakeEngine
from tests.sessions.migrate.files import changed, fed, ids
from tests.tiny import write_tiny

TOKENS = ids(30)


# --- geometry ---------------------------------------------------------------------------------------


def test_a_llama_has_one_cache_and_turns_neighbours(make_engine: MakeEngine) -> None:
    geometry = geometry_of(make_engine())
    layers = tuple(LayerRows(layer, 1, 64, 64, 64) for layer in range(3))
    assert geometry.caches == (RowsCache(CacheRole.FULL, layers),)
    assert (geometry.architecture, geometry.pairing) == ("llama", Pairing.INTERLEAVED)
    assert (geometry.num_layers, geometry.vocab_size) == (3, 260)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_turns_halves(make_engine: MakeEngine, tmp_path: Path, family: str) -> None:
    geometry = geometry_of(make_engine(write_tiny(tmp_path / "qwen.gguf", family)))
    assert (geometry.architecture, geometry.pairing) == (family, Pairing.HALVES)


def test_windows_have_a_cache_of_their_own(make_engine: MakeEngine, windowed_path: Path) -> None:
    full, windowed = geometry_of(make_engine(windowed_path)).caches
    assert isinstance(full, RowsCache)
    assert isinstance(windowed, RowsCache)
    assert ([each.layer for each in full.layers], full.window) == ([5], None)
    assert [each.layer for each in windowed.layers] == [0, 1, 2, 3, 4, 6]
    assert windowed.window == Window(32)


def test_a_family_without_windows_in_llama_cpp_has_one_cache_there() -> None:
    engine = open_member("mistral", "f32")
    assert [each.role for each in geometry_of(engine).caches if isinstance(each, RowsCache)] == ["full"]
    assert [each.role for each in own_geometry_of(engine).caches if isinstance(each, RowsCache)] == ["window"]


def test_a_hybrid_has_rows_and_states() -> None:
    geometry = geometry_of(open_member("falcon_h1", "f32"))
    rows, states = geometry.caches
    assert isinstance(rows, RowsCache)
    assert states == RecurrentCache(3, tuple(StateLayer(layer, 3 * 192, 8 * 16 * 16) for layer in range(3)))
    assert geometry.architecture == "falcon-h1"


def test_layers_at_the_end_that_remember_nothing_count() -> None:
    assert geometry_of(open_member("nemotron_h", "f32")).num_layers == 6


def test_an_indexers_rows_are_in_their_place() -> None:
    roles = [
        each.role
        for each in own_geometry_of(open_member("deepseek_v32", "f32")).caches
        if isinstance(each, RowsCache)
    ]
    assert roles == [CacheRole.FULL, CacheRole.INDEX]


def test_qwen_3_5_has_cells_with_two_dimensions() -> None:
    assert geometry_of(open_member("qwen3_5", "f32")).extension is CellExtension.POSITION_2D


def test_a_family_that_llama_cpp_is_not_known_to_have() -> None:
    engine = open_member("recurrent_gemma", "f32")
    with pytest.raises(Unsupported, match="recurrent_gemma"):
        geometry_of(engine)
    assert own_geometry_of(engine).architecture == "recurrent_gemma"


def test_block_rows_have_no_equivalent() -> None:
    with pytest.raises(Unsupported, match="block rows"):
        own_geometry_of(open_member("deepseek_v4", "f32"))


# --- imports ----------------------------------------------------------------------------------------


def recurrent_state(engine: Engine, tokens: tuple[int, ...]) -> ForeignState:
    """The state of mamba2 after `tokens`, as a library of Python has it."""
    (point,) = engine.snapshot(fed(engine, tokens)).points
    rows = []
    for spec, part in zip(engine.layout, point.parts, strict=True):
        tensor = Tensor.CONV if ".conv." in spec.name else Tensor.STATE
        rows.append(ForeignRows(spec.layer, tensor, "f32", part[None]))
    made = ForeignPoint(len(tokens) - 1, tuple(rows))
    return ForeignState("a test", "", tokens, (), made, Rotation.NONE, ValueOrder.OURS)


def test_recurrent_state_is_not_believed_the_ids_are_read() -> None:
    engine = open_member("mamba2", "f32")
    manager, state = SessionManager(MemoryStore(), engine), recurrent_state(engine, TOKENS)
    for name, taking in (("proven", Taking.PROVEN), ("trusted", Taking.TRUSTED)):
        # The token that follows is not known, and could not be computed from the state: trust is no help.
        examined = import_foreign(manager, state, Wish(name, taking=taking)).examined
        assert examined.num_read == 30
        assert examined.brought.proven is Proven.REREAD
    with pytest.raises(UsageError, match="no token ids"):
        import_foreign(manager, changed(state, tokens=None), Wish("other"))


def test_recurrent_state_that_is_trusted_goes_on_where_it_was() -> None:
    engine = open_member("mamba2", "f32")
    manager, state = SessionManager(MemoryStore(), engine), recurrent_state(engine, TOKENS[:-1])
    wish = Wish("report", tokens=TOKENS, taking=Taking.TRUSTED)
    examined = import_foreign(manager, state, wish).examined
    assert (examined.num_read, examined.brought.proven) == (1, Proven.UNVERIFIED)
    manifest = manager.manifest("report")
    assert [span.provenance for span in manifest.spans] == [Provenance.IMPORTED, Provenance.COMPUTED]
    session = manager.open("report")
    seq, _ = manager.resume(session)
    session.close()
    live = fed(engine, TOKENS)
    went_on = [[piece.token for piece in engine.generate(each, max_tokens=8)] for each in (seq, live)]
    assert went_on[0] == went_on[1]


# --- exports ----------------------------------------------------------------------------------------


def saved(engine: Engine) -> SessionManager:
    manager = SessionManager(MemoryStore(), engine)
    session = manager.create("report")
    manager.save(session, fed(engine, TOKENS), ())
    session.close()
    return manager


@pytest.mark.parametrize(
    ("family", "format", "said"),
    [
        ("cohere2", "llama", "cohere2: no llama"),
        ("falcon_h1", "transformers", "recurrent state"),
        ("deepseek_v3", "transformers", "latents"),
        ("recurrent_gemma", "llama", "not known"),
    ],
)
def test_what_the_other_system_cannot_hold_is_refused(family: str, format: str, said: str) -> None:
    manager = saved(open_member(family, "f32"))
    with pytest.raises(Unsupported, match=said):
        export_foreign(manager.engine, manager.store, manager.manifest("report"), io.BytesIO(), format)

"""A session goes out to another system as a file that comes back as it went, or is refused by what it
lacks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from engine.errors import FingerprintMismatch, Unsupported, UsageError
from engine.runner import Engine
from serialization.foreign.foreign_state import ForeignState, Rotation
from serialization.foreign.readers import Asked, Kind, read_bytes
from sessions.manager import SessionManager
from sessions.migrate.export import FORMATS, Exported, Shape, export_foreign
from sessions.migrate.foreign import ForeignFiles, Told
from sessions.migrate.geometry import geometry_of, own_geometry_of
from sessions.migrate.imports import Examined, Wish, import_foreign
from sessions.migrate.plan import Fate
from sessions.stores.memory import MemoryStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.migrate.files import fed, ids
from tests.tiny import write_tiny

TOKENS = ids(50)


def saved(engine: Engine, tokens: tuple[int, ...] = TOKENS) -> SessionManager:
    """A store with a session `report` of these tokens, and the next one pending."""
    manager = SessionManager(MemoryStore(), engine)
    seq = fed(engine, tokens)
    engine.choose(seq)
    session = manager.create("report")
    manager.save(session, seq, ())
    session.close()
    return manager


def written(
    manager: SessionManager, format: str = "llama", shape: Shape | None = None
) -> tuple[bytes, Exported]:
    out = io.BytesIO()
    engine = manager.engine
    told = export_foreign(engine, manager.store, manager.manifest("report"), out, format, shape)
    assert told.nbytes == len(out.getvalue())
    return out.getvalue(), told


def read(data: bytes, engine: Engine, format: str) -> ForeignState:
    llama = format.startswith("llama")
    geometry = geometry_of(engine) if llama else own_geometry_of(engine)
    kind = Kind.LLAMA_CPP if llama else Kind.TRANSFORMERS
    return read_bytes(bytearray(data), Asked(geometry, tokens=TOKENS), kind)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_what_goes_out_comes_back_bit_for_bit(make_engine: MakeEngine, dtype: str, format: str) -> None:
    engine = make_engine(type_k=dtype, type_v=dtype)
    manager = saved(engine)
    data, told = written(manager, format, Shape(dtype, dtype))
    assert told.conversion.exact
    back = import_foreign(manager, read(data, engine, format), Wish("back"))
    assert back.examined.conversion.exact
    states = []
    for name in ("report", "back"):
        session = manager.open(name)
        seq, _ = manager.resume(session)
        session.close()
        states.append(engine.snapshot(seq))
    ours, theirs = states
    assert ours.tokens == theirs.tokens
    assert all(torch.equal(a, b) for a, b in zip(ours.rows[0].parts, theirs.rows[0].parts, strict=True))


@pytest.mark.parametrize("shape", [Shape("f16", "f16"), Shape("f16", "f16", flash_attention=False)])
def test_it_is_written_a_second_time_as_the_first(make_engine: MakeEngine, shape: Shape) -> None:
    """Out, in, and out again: also where values lie a channel at a time."""
    engine = make_engine(type_k="f16", type_v="f16")
    manager = saved(engine)
    data, _ = written(manager, "llama", shape)
    again = SessionManager(MemoryStore(), engine)
    import_foreign(again, read(data, engine, "llama"), Wish("report"))
    assert written(again, "llama", shape)[0] == data


def test_windows_go_out_as_llama_cpp_has_them(make_engine: MakeEngine, windowed_path: Path) -> None:
    engine = make_engine(windowed_path, type_k="f16", type_v="f16")
    data, _ = written(saved(engine, ids(90)))
    state = read(data, engine, "llama")
    assert [list(cells.positions) for cells in state.caches] == [list(range(90)), list(range(58, 90))]


def test_plain_rows_are_f16_if_nothing_else_is_said_and_quantized_ones_stay(make_engine: MakeEngine) -> None:
    _, told = written(saved(make_engine(type_k="bf16", type_v="f32")))
    assert told.settings == "-ctk f16 -ctv f16 -fa on"
    assert 0 < told.conversion.loss < 1e-3
    _, told = written(saved(make_engine(type_k="q8_0", type_v="q4_0")))
    assert told.settings == "-ctk q8_0 -ctv q4_0 -fa on"


def test_the_token_that_follows_is_told(make_engine: MakeEngine) -> None:
    engine = make_engine(type_k="f16", type_v="f16")
    manager = saved(engine)
    edge = manager.manifest("report").edge
    _, told = written(manager)
    assert told.pending == getattr(edge, "token", None)
    assert "up to 0.5" in told.read_by


def test_an_engine_with_other_dtypes_writes_it_as_well(make_engine: MakeEngine) -> None:
    manager = saved(make_engine(type_k="q8_0", type_v="f16"))
    data, _ = written(manager)
    other = SessionManager(manager.store, make_engine(type_k="f32", type_v="f32"))
    assert written(other)[0] == data


def test_rows_can_be_written_for_who_does_not_rotate(make_engine: MakeEngine) -> None:
    engine = make_engine(type_k="q8_0", type_v="q8_0")
    data, told = written(saved(engine), shape=Shape(rotation=Rotation.NONE))
    assert told.conversion.loss > 0
    found = import_foreign(SessionManager(MemoryStore(), engine), read(data, engine, "llama"), Wish())
    assert found.examined.rotation is Rotation.NONE


# --- what is refused --------------------------------------------------------------------------------


def test_a_format_that_there_is_not(make_engine: MakeEngine) -> None:
    with pytest.raises(UsageError, match="there are llama, "):
        written(saved(make_engine()), "gguf")


def test_another_models_session(make_engine: MakeEngine, tmp_path: Path) -> None:
    manager = saved(make_engine())
    other = make_engine(write_tiny(tmp_path / "other.gguf", seed=1))
    with pytest.raises(FingerprintMismatch, match="weights"):
        written(SessionManager(manager.store, other))


def test_a_session_whose_rows_were_given_up(make_engine: MakeEngine) -> None:
    manager = saved(make_engine())
    manager.release_rows("report")
    with pytest.raises(Unsupported, match="no stored rows"):
        written(manager)


def test_quantized_values_without_flash_attention(make_engine: MakeEngine) -> None:
    with pytest.raises(Unsupported, match="with flash attention alone"):
        written(saved(make_engine(type_k="q8_0", type_v="q8_0")), shape=Shape(flash_attention=False))


def test_values_that_a_dtype_cannot_say(make_engine: MakeEngine) -> None:
    manager = saved(make_engine(type_k="f32", type_v="f32"))
    session = manager.open("report")
    seq, _ = manager.resume(session)
    state = manager.engine.snapshot(seq)
    state.rows[0].parts[0].view(torch.float32)[0] = 1e6
    huge = manager.engine.restore(state)
    session.synced = 0
    manager.save(session, huge, ())
    session.close()
    with pytest.raises(Unsupported, match="cannot say"):
        written(manager)


# --- as one end of a migration ----------------------------------------------------------------------


def test_a_file_is_planned_and_read_with_rows_as_they_are(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(type_k="f16", type_v="f16")
    path = tmp_path / "state.bin"
    path.write_bytes(written(saved(engine))[0])
    asked: list[dict[str, str]] = []

    def opening(types: object) -> Engine:
        asked.append(dict(types))  # type: ignore[call-overload]
        return make_engine(**asked[-1])

    examined: list[Examined] = []
    files = ForeignFiles(opening, told=Told(examined=examined.append))
    plan = files.plan_read(path)
    fates = [(item.fate, item.what, item.count) for item in plan]
    assert fates == [
        (Fate.KEPT, "token ids", 50),
        (Fate.KEPT, "text", 1),
        (Fate.KEPT, "keys of 3 layers", 50),
        (Fate.KEPT, "values of 3 layers", 50),
        (Fate.RECOMPUTED, "proof: last tokens", 8),
    ]
    manifest = files.read(path, MemoryStore())
    assert manifest.tokens == TOKENS
    assert manifest.name is None
    assert asked == [{}, {"type_k": "f16", "type_v": "f16"}] * 2
    assert [each.tokens for each in examined] == [TOKENS]


def test_a_session_is_planned_and_written(make_engine: MakeEngine) -> None:
    manager, told = saved(make_engine()), []
    files = ForeignFiles(lambda types: make_engine(**types), told=Told(exported=told.append))
    manifest, out = manager.manifest("report"), io.BytesIO()
    converted, *dropped = files.plan_write(manifest)
    assert (converted.fate, converted.count) == (Fate.CONVERTED, 50)
    assert {item.fate for item in dropped} == {Fate.DROPPED}
    assert files.write(manifest, manager.store, out) == len(out.getvalue()) == told[0].nbytes

"""Dumps of transformers caches: what the functions of docs/foreign.md write is read as our rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load
from transformers import DynamicCache, StaticCache

from engine.errors import (
    Corrupt,
    FingerprintMismatch,
    StateError,
    UnknownFeature,
    UnknownVersion,
    Unsupported,
)
from engine.runner import Engine
from engine.state import PartKind, SequenceState
from serialization.foreign.convert import Converted, to_rows
from serialization.foreign.foreign_state import ValueOrder
from serialization.foreign.geometry import (
    CacheRole,
    Geometry,
    LayerRows,
    RecurrentCache,
    RowsCache,
    StateLayer,
    Window,
)
from serialization.foreign.outward import Wanted, to_foreign
from serialization.foreign.tensor_file import Array, read_tensor_file, write_tensor_file
from serialization.foreign.torch_dump import FORMAT, read_torch_dump, write_torch_dump
from sessions.migrate.geometry import own_geometry_of, target_of
from tests.exact.members import folder
from tests.oracles import base
from tests.serialization.foreign.transformers_functions import functions

#: All whose caches are of transformers' own classes, and whose rows are stored as they are.
FAMILIES = (
    *(
        "bamba",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots3_note",
        "falcon_mamba",
        "gemma2",
    ),
    *("gemma3", "gemma3n", "gemma4", "glm_moe_dsa", "gpt_oss", "granitemoehybrid", "jamba", "kimi_linear"),
    *("lfm2", "llama", "llama4", "longcat_flash", "mamba", "mamba2", "mistral", "nemotron_h", "olmo_hybrid"),
    *("phi", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_next", "zamba2"),
)

LENGTH = 40


def filled(family: str, ids: list[int]) -> tuple[transformers.PreTrainedModel, DynamicCache]:
    """transformers' model of a family, and its cache after these ids."""
    model = base.build(family)
    cache = DynamicCache(config=model.config)
    run(model, cache, ids)
    return model, cache


def run(model: transformers.PreTrainedModel, cache: DynamicCache, ids: list[int]) -> torch.Tensor:
    name = "cache_params" if "mamba" in model.config.model_type else "past_key_values"
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=True, **{name: cache}).logits
    return logits[0, -1]


def dump(path: Path, family: str, ids: list[int]) -> memoryview:
    model, cache = filled(family, ids)
    functions()["save_cache"](cache, path, ids, model.config.model_type)
    return memoryview(path.read_bytes())


def ours(engine: Engine, ids: list[int]) -> SequenceState:
    seq = engine.create()
    engine.feed(seq, ids)
    return engine.snapshot(seq)


def differences(found: Converted, state: SequenceState) -> list[float]:
    """The largest difference in each part that both have; a row that no token will see again is left out."""
    largest = []
    for rows in found.rows:
        (run_,) = state.rows_of(rows.kind)
        start = max(rows.start, run_.start)
        if rows.kind is PartKind.WINDOW:
            start = max(start, found.window_start)
        for mine, theirs in zip(run_.parts, rows.parts, strict=True):
            a, b = mine[start - run_.start :], theirs[start - rows.start :]
            assert a.shape == b.shape
            largest.append(float((a.view(torch.float32) - b.view(torch.float32)).abs().max()))
    for point in found.points:
        (mine_,) = [each for each in state.points if each.position == point.position]
        for a, b in zip(mine_.parts, point.parts, strict=True):
            largest.append(float((a.view(torch.float32) - b.view(torch.float32)).abs().max()))
    return largest


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_transformers_are_those_that_our_engine_computes(family: str, tmp_path: Path) -> None:
    ids = base.tokens(3, LENGTH)
    engine = base.open_engine(folder(family))
    geometry = own_geometry_of(engine)
    state = read_torch_dump(dump(tmp_path / "cache.safetensors", family, ids), geometry)
    assert (state.length, state.tokens, state.order) == (LENGTH, tuple(ids), ValueOrder.OURS)
    found = to_rows(state, geometry, target_of(engine))
    largest = differences(found, ours(engine, ids))
    assert len(largest) == len(engine.layout)
    assert max(largest) < 1e-4


@pytest.mark.parametrize("length", [1, 11, 12, 13, 14])
def test_a_window_is_read_before_it_is_full_and_after(length: int, tmp_path: Path) -> None:
    """12 tokens wide, of which transformers keeps 11."""
    ids = base.tokens(3, length)
    engine = base.open_engine(folder("gemma3"))
    geometry = own_geometry_of(engine)
    state = read_torch_dump(dump(tmp_path / "cache.safetensors", "gemma3", ids), geometry)
    found = to_rows(state, geometry, target_of(engine))
    assert found.unseen == (length >= 12)
    assert found.window_start == max(0, length - 11)
    assert max(differences(found, ours(engine, ids))) < 1e-4
    engine.restore(replace(ours(engine, ids), rows=found.rows))


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere2"])
def test_a_dump_that_we_write_goes_on_in_transformers(family: str, tmp_path: Path) -> None:
    ids, more = base.tokens(3, LENGTH), base.tokens(4, 9)
    engine = base.open_engine(folder(family))
    geometry = own_geometry_of(engine)
    state, _ = to_foreign(
        "ours",
        target_of(engine),
        geometry,
        ours(engine, ids).rows,
        tuple(ids),
        Wanted("f32", "f32", ValueOrder.OURS),
    )
    model, live = filled(family, ids)
    path = tmp_path / "ours.safetensors"
    path.write_bytes(b"".join(write_torch_dump(state, geometry, model.config.model_type)))
    cache, tokens = functions()["load_cache"](DynamicCache(config=model.config), path)
    assert tokens == ids
    assert cache.get_seq_length() == LENGTH
    assert torch.allclose(run(model, cache, more), run(model, live, more), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "qwen3_next", "lfm2"])
def test_what_is_saved_and_loaded_in_transformers_goes_on_bit_for_bit(family: str, tmp_path: Path) -> None:
    ids, more = base.tokens(3, LENGTH), base.tokens(4, 1)
    model, live = filled(family, ids)
    path = tmp_path / "cache.safetensors"
    functions()["save_cache"](live, path, ids)
    cache, _ = functions()["load_cache"](DynamicCache(config=model.config), path)
    assert torch.equal(run(model, cache, more), run(model, live, more))


@pytest.mark.parametrize("family", ["falcon_h1", "mimo_v2_flash"])
def test_rows_that_are_stored_multiplied_are_refused(family: str, tmp_path: Path) -> None:
    engine = base.open_engine(folder(family))
    with pytest.raises(UnknownFeature, match="multiplied by what"):
        read_torch_dump(
            dump(tmp_path / "cache.safetensors", family, base.tokens(3, 9)), own_geometry_of(engine)
        )


def test_save_cache_refuses_what_it_cannot_save_whole(tmp_path: Path) -> None:
    save, path = functions()["save_cache"], tmp_path / "cache.safetensors"
    model = base.build("llama")
    with pytest.raises(ValueError, match="StaticLayer"):
        save(StaticCache(config=model.config, max_cache_len=32), path)
    with pytest.raises(ValueError, match="after how many tokens"):
        save(DynamicCache(config=model.config), path)
    batch = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([[1, 2], [3, 4]]), past_key_values=batch)
    with pytest.raises(ValueError, match="several sequences"):
        save(batch, path)
    with pytest.raises(ValueError, match="is a DeepseekV4"):
        dump(path, "deepseek_v4", base.tokens(3, 9))
    assert not path.exists()


# --- files written here, to be wrong in one thing ---------------------------------------------------

HEADS, SIZE, ROWS = 2, 4, 5
SHAPE = LayerRows(0, HEADS, SIZE, SIZE, 4)
ONE = Geometry("tiny", 100, 2, (RowsCache(CacheRole.FULL, (SHAPE,)),))
SLIDING = Geometry("tiny", 100, 1, (RowsCache(CacheRole.WINDOW, (SHAPE,), Window(4)),))
BOTH = Geometry(
    "tiny", 100, 1, (RowsCache(CacheRole.FULL, (SHAPE,)), RecurrentCache(1, (StateLayer(0, 6, 8),)))
)
SAID = {"format": FORMAT, "version": "1", "kinds": "full", "length": "5"}
NAMES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "uint16": "BF16"}


def values(rows: int = ROWS, heads: int = HEADS, size: int = SIZE, dtype: str = "float32") -> Array:
    return np.arange(heads * rows * size).reshape(1, heads, rows, size).astype(dtype)


def written(said: Mapping[str, str] = SAID, **arrays: Array) -> memoryview:
    """`_0_keys` for `0.keys`."""
    named = {name.strip("_").replace("_", "."): array for name, array in arrays.items()}
    tensors = {name: (NAMES[array.dtype.name], array) for name, array in named.items()}
    return memoryview(b"".join(write_tensor_file(tensors, said)))


def plain(**changes: str) -> memoryview:
    return written({**SAID, **changes}, _0_keys=values(), _0_values=values())


def test_the_files_written_here_are_read() -> None:
    state = read_torch_dump(plain(), ONE)
    assert (state.length, state.tokens) == (5, None)
    want = torch.from_numpy(values()[0].transpose(1, 0, 2).reshape(ROWS, -1).copy())
    assert all(torch.equal(rows.data.view(torch.float32), want) for rows in state.caches[0].rows)
    assert read_torch_dump(plain(), ONE, tokens=range(5)).tokens == (0, 1, 2, 3, 4)
    ids = np.arange(6, dtype="int64")
    with_ids = written(_0_keys=values(), _0_values=values(), tokens=ids)
    assert read_torch_dump(with_ids, ONE, tokens=range(9)).tokens == (0, 1, 2, 3, 4, 5)


WRONG: list[tuple[Callable[[], memoryview], type[StateError], str]] = [
    (lambda: plain(format="pt"), UnknownFeature, "does not say that its format"),
    (lambda: plain(version="2"), UnknownVersion, "version '2'"),
    (lambda: plain(kinds="full static"), UnknownFeature, "layer that is 'static'"),
    (lambda: plain(kinds=""), UnknownFeature, "layer that is ''"),
    (lambda: plain(kinds="full none none"), FingerprintMismatch, "3 layers, and the model 2"),
    (lambda: plain(kinds="none full"), Corrupt, "1.keys is missing"),
    (lambda: plain(kinds="none"), Corrupt, "'0.keys' is of no layer"),
    (lambda: plain(kinds="linear+full"), FingerprintMismatch, "holds recurrent state"),
    (lambda: plain(length="-5"), Corrupt, "cache of '-5' tokens"),
    (lambda: plain(length="0"), Corrupt, "cache of '0' tokens"),
    (lambda: plain(length="٥"), Corrupt, "cache of '.*' tokens"),
    (lambda: plain(length="9" * 11), Corrupt, "cache of '9*' tokens"),
    (lambda: plain(length="4"), Corrupt, "5 rows of 4 tokens"),
    (lambda: plain(length="6"), Corrupt, "not the rows of all 6 tokens"),
    (lambda: written(_0_keys=values()), Corrupt, "0.values is missing"),
    (lambda: written(_0_keys=values(), _0_values=values(4)), Corrupt, "keys of"),
    (lambda: written(_0_keys=values(), _0_values=values(), _0_more=values()), Corrupt, "'0.more' is of no"),
    (lambda: written(_0_keys=values()[0], _0_values=values()), Corrupt, "3 axes"),
    (lambda: written(_0_keys=values().repeat(2, 0), _0_values=values()), UnknownFeature, "batch of 2"),
    (lambda: written(_0_keys=values(dtype="int32"), _0_values=values()), UnknownFeature, "of I32"),
    (lambda: written(_0_keys=values(heads=1), _0_values=values(heads=1)), FingerprintMismatch, "1 heads"),
    (lambda: written(_0_keys=values(size=6), _0_values=values()), FingerprintMismatch, "of 6 values"),
    (lambda: written(_0_keys=values(size=0), _0_values=values()), Corrupt, "5 rows of 5 tokens"),
    (
        lambda: written(_0_keys=values(), _0_values=values(), tokens=np.arange(4, dtype="int64")),
        Corrupt,
        "4 token ids for the rows of 5",
    ),
    (
        lambda: written(_0_keys=values(), _0_values=values(), tokens=np.arange(5, dtype="int32")),
        Corrupt,
        "not a list of ids",
    ),
    (
        lambda: written(_0_keys=values(), _0_values=values(), tokens=-np.arange(5, dtype="int64")),
        Corrupt,
        "token ids that are none",
    ),
]


@pytest.mark.parametrize(("made", "error", "says"), WRONG)
def test_a_file_that_is_wrong_in_one_thing_is_refused(
    made: Callable[[], memoryview], error: type[StateError], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_torch_dump(made(), ONE)


def test_a_window_has_the_rows_that_the_next_token_sees() -> None:
    said = {**SAID, "kinds": "sliding", "length": "9"}
    for count in (5, 4, 3):
        state = read_torch_dump(written(said, _0_keys=values(count), _0_values=values(count)), SLIDING)
        assert state.caches[0].positions.tolist() == list(range(9 - count, 9))
    with pytest.raises(Corrupt, match="needed from token 6 on"):
        read_torch_dump(written(said, _0_keys=values(2), _0_values=values(2)), SLIDING)


def test_inputs_of_convolutions_are_the_last_of_all_side_by_side() -> None:
    conv = np.arange(8, dtype="float32").reshape(1, 2, 4)
    more: dict[str, Any] = {
        "_0_keys": values(),
        "_0_values": values(),
        "_0_state": np.ones((1, 2, 4), "float32"),
    }
    said = {**SAID, "kinds": "linear+full"}
    state = read_torch_dump(written(said, _0_conv_0=conv, **more), BOTH)
    assert state.point is not None
    assert state.point.position == 4
    assert state.point.rows[0].data.view(torch.float32).tolist() == [[1.0, 5.0, 2.0, 6.0, 3.0, 7.0]]
    parts = {"_0_conv_0": conv[:, :1], "_0_conv_1": conv[:, 1:]}
    assert torch.equal(
        read_torch_dump(written(said, **parts, **more), BOTH).point.rows[0].data,  # type: ignore[union-attr]
        state.point.rows[0].data,
    )
    for wrong in (conv[:, :, :2], conv.repeat(2, 1).repeat(2, 1)):
        with pytest.raises(FingerprintMismatch, match="inputs of a convolution of"):
            read_torch_dump(written(said, _0_conv_0=wrong, **more), BOTH)
    short = {**more, "_0_state": np.ones((1, 4), "float32")}
    with pytest.raises(FingerprintMismatch, match="a state of 4 values, and the model's has 8"):
        read_torch_dump(written(said, _0_conv_0=conv, **short), BOTH)


@pytest.mark.parametrize("geometry", [ONE, SLIDING])
@pytest.mark.parametrize("dtype", ["float16", "float32", "uint16"])
@pytest.mark.parametrize("model", [None, "cohere2"])
def test_what_is_written_is_read_and_written_again_byte_for_byte(
    geometry: Geometry, dtype: str, model: str | None
) -> None:
    kind, count = ("full", ROWS) if geometry is ONE else ("sliding", 3)
    kinds = f"{kind} none" if geometry is ONE else kind
    said = {"format": FORMAT, "version": "1", "kinds": kinds, "length": "5"}
    if model is not None:
        said["model_type"] = model
    ids = np.arange(5, dtype="int64")
    first = written(
        said, tokens=ids, _0_keys=values(count, dtype=dtype), _0_values=values(count, dtype=dtype)
    )
    state = read_torch_dump(first, geometry)
    assert b"".join(write_torch_dump(state, geometry, model)) == bytes(first)


def test_cells_in_any_order_are_written_in_that_of_positions() -> None:
    state = read_torch_dump(plain(), ONE)
    (cells,) = state.caches
    order = [3, 1, 4, 0, 2]
    rows = tuple(type(each)(each.layer, each.tensor, each.dtype, each.data[order]) for each in cells.rows)
    shuffled = replace(state, caches=(type(cells)(cells.role, cells.positions[order], rows),))
    assert b"".join(write_torch_dump(shuffled, ONE)) == b"".join(write_torch_dump(state, ONE))


def test_what_transformers_has_no_place_for_is_not_written() -> None:
    state = read_torch_dump(plain(), ONE)
    with pytest.raises(Unsupported, match="in the order of"):
        write_torch_dump(replace(state, order=ValueOrder.GGML), ONE)
    (cells,) = state.caches
    quantized = tuple(type(each)(each.layer, each.tensor, "q8_0", each.data) for each in cells.rows)
    with pytest.raises(Unsupported, match="q8_0"):
        write_torch_dump(replace(state, caches=(type(cells)(cells.role, cells.positions, quantized),)), ONE)
    latents = Geometry("tiny", 100, 1, (RowsCache(CacheRole.FULL, (LayerRows(0, 2, 4, None),)),))
    with pytest.raises(Unsupported, match="latents"):
        write_torch_dump(
            replace(state, caches=(type(cells)(cells.role, cells.positions, cells.rows[:1]),)), latents
        )
    gap = type(cells)(cells.role, cells.positions + (cells.positions > 2), cells.rows)
    with pytest.raises(Corrupt, match="has not a row for each"):
        write_torch_dump(replace(state, caches=(gap,)), ONE)


def test_the_library_reads_what_we_write() -> None:
    state = read_torch_dump(plain(), ONE)
    data = b"".join(write_torch_dump(state, ONE))
    assert torch.equal(load(data)["0.keys"], torch.from_numpy(values()))
    assert read_tensor_file(memoryview(data)).metadata["kinds"] == "full none"

"""Prompt caches that mlx-lm wrote, of every class and layout: each row is the one it should be."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from engine.errors import Corrupt, FingerprintMismatch, LimitExceeded, UnknownFeature
from serialization.foreign.convert import to_rows
from serialization.foreign.foreign_state import ForeignState, Rotation, Tensor, ValueOrder
from serialization.foreign.geometry import (
    CacheRole,
    Geometry,
    LayerRows,
    RecurrentCache,
    RowsCache,
    StateLayer,
    Window,
)
from serialization.foreign.held import Floats
from serialization.foreign.mlx import read_mlx, rows_of
from serialization.foreign.mlx_tree import META, SCALARS, read_tree
from serialization.foreign.tensor_file import Array, read_tensor_file, write_tensor_file
from sessions.migrate.geometry import own_geometry_of, target_of
from tests.exact.members import folder
from tests.oracles import base
from tests.serialization.foreign.test_torch_dump import differences

GOLDEN = Path(__file__).parents[2] / "golden" / "mlx-lm"
HEADS, SIZE = 2, 4
VERSIONS = ("0.31.3", "0.32.2")
LAYOUT = {"0.28.0": META, "0.31.3": META, "0.32.2": SCALARS}


def golden(name: str) -> memoryview:
    return memoryview((GOLDEN / f"{name}.safetensors").read_bytes())


def shape(layer: int, size: int = SIZE, n_rot: int = 0) -> LayerRows:
    return LayerRows(layer, HEADS, size, size, n_rot)


def geometry(*caches: RowsCache | RecurrentCache, layers: int, architecture: str = "tiny") -> Geometry:
    return Geometry(architecture, 1000, layers, caches)


PLAIN = geometry(RowsCache(CacheRole.FULL, (shape(0), shape(1))), layers=2)


def made(layer: int, tensor: int, positions: Array, size: int = SIZE) -> Array:
    """What `golden/mlx_caches.py` fed: [tokens, heads, size]."""
    t, h, d = np.ix_(positions, np.arange(HEADS), np.arange(size))
    return (7 * t + 31 * h + 3 * d + 11 * layer + 5 * tensor) % 127 - 63


def bf16(data: torch.Tensor) -> Array:
    return data.view(torch.bfloat16).to(torch.float64).numpy()


def check(state: ForeignState, role: CacheRole, start: int, stop: int, layers: tuple[int, ...]) -> None:
    """One cache has exactly the rows of [start, stop), of these layers, keys and then values."""
    (cells,) = [each for each in state.caches if each.role is role]
    positions = np.arange(start, stop)
    assert cells.positions.tolist() == positions.tolist()
    order = [(layer, tensor) for tensor in (Tensor.KEYS, Tensor.VALUES) for layer in layers]
    assert [(rows.layer, rows.tensor) for rows in cells.rows] == order
    for rows in cells.rows:
        assert rows.dtype == "bf16"
        assert rows.data.shape == (stop - start, HEADS * SIZE * 2)
        want = made(rows.layer, 0 if rows.tensor is Tensor.KEYS else 1, positions)
        assert (bf16(rows.data).reshape(want.shape) == want).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_rows_are_those_up_to_the_last_token(version: str) -> None:
    state = read_mlx(golden(f"plain-{version}"), PLAIN)
    assert (state.layout, state.rotation, state.order) == (LAYOUT[version], Rotation.NONE, ValueOrder.OURS)
    assert state.length == 7
    assert state.point is None
    check(state, CacheRole.FULL, 0, 7, (0, 1))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_saved_beside_a_cache_is_told(version: str) -> None:
    state = read_mlx(golden(f"plain-{version}"), PLAIN)
    assert state.tokens == tuple(range(100, 107))
    assert state.notes == ("the file says 'model': 'tiny'",)


def test_token_ids_of_the_caller_are_for_a_file_that_has_none() -> None:
    assert read_mlx(golden("plain-0.32.2"), PLAIN, tokens=[1] * 7).tokens == tuple(range(100, 107))
    windows = golden("windows-0.32.2")
    assert read_mlx(windows, WINDOWS).tokens is None
    assert read_mlx(windows, WINDOWS, tokens=range(13)).tokens == tuple(range(13))
    with pytest.raises(Corrupt, match="12 token ids for the rows of 13 tokens"):
        read_mlx(windows, WINDOWS, tokens=range(12))


WINDOWS = geometry(
    RowsCache(CacheRole.FULL, (shape(1),)),
    RowsCache(CacheRole.WINDOW, (shape(0), shape(2)), Window(8)),
    layers=3,
)


@pytest.mark.parametrize("version", VERSIONS)
def test_windows_that_have_wrapped_are_put_in_order(version: str) -> None:
    state = read_mlx(golden(f"windows-{version}"), WINDOWS)
    check(state, CacheRole.FULL, 0, 13, (1,))
    check(state, CacheRole.WINDOW, 5, 13, (0, 2))


def test_a_window_that_is_not_all_there_is_refused() -> None:
    wider = geometry(
        WINDOWS.caches[0], RowsCache(CacheRole.WINDOW, (shape(0), shape(2)), Window(10)), layers=3
    )
    with pytest.raises(Corrupt, match="needed from token 4 on, and none is there before 5"):
        read_mlx(golden("windows-0.32.2"), wider)


def test_a_full_cache_that_let_rows_go_is_refused() -> None:
    """`--max-kv-size`: the model would see all of them."""
    full = geometry(RowsCache(CacheRole.FULL, (shape(0), shape(1), shape(2))), layers=3)
    with pytest.raises(Corrupt, match="layer 0: rows are needed from token 0 on"):
        read_mlx(golden("windows-0.32.2"), full)


#: For every ring of `golden/mlx_caches.py`, the positions that it holds: a prompt leaves more than its slots.
RINGS: tuple[tuple[int, ...], ...] = (
    tuple(range(5)),
    tuple(range(8)),
    tuple(range(20)),
    tuple(range(7)),
    tuple(range(2, 10)),
    tuple(range(13, 21)),
    tuple(range(15, 23)),
    tuple(range(16, 24)),
    tuple(range(7)),
    (0, 1, 2, 3, 18, 19, 20, 21),
    (0, 1, 2, 3, 9, 10, 11, 12),
    tuple(range(5)),
    tuple(range(3, 15)),
    tuple(range(260)),
)


@pytest.mark.parametrize("version", ["0.28.0", *VERSIONS])
def test_a_ring_is_read_whatever_it_has_gone_through(version: str) -> None:
    tree = read_tree(read_tensor_file(golden(f"rings-{version}")))
    assert len(tree.nodes) == len(RINGS)
    for layer, (node, positions) in enumerate(zip(tree.nodes, RINGS, strict=True)):
        if version == "0.28.0" and layer == 12:
            positions = (2, *positions)  # it kept one more of them
        rows = rows_of(tree, node)
        found = [p for run in rows.runs for p in range(run.position, run.stop)]
        assert tuple(found) == positions, (layer, node.numbers)
        slots = [slot for run in rows.runs for slot in range(run.slot, run.slot + run.count)]
        assert rows.values is not None
        for tensor, floats in enumerate((rows.keys, rows.values)):
            assert isinstance(floats, Floats)
            values = (floats.values[:, slots].transpose(1, 0, 2).astype(np.uint32) << 16).view(np.float32)
            assert (values == made(layer, tensor, np.array(positions))).all()


CHUNKED = geometry(
    RowsCache(CacheRole.FULL, (shape(1),)),
    RowsCache(CacheRole.WINDOW, (shape(0),), Window(8, chunked=True)),
    layers=2,
)


def test_a_chunked_layer_begins_where_its_front_was_cut() -> None:
    state = read_mlx(golden("chunks-0.32.2"), CHUNKED)
    check(state, CacheRole.FULL, 0, 13, (1,))
    check(state, CacheRole.WINDOW, 4, 13, (0,))


QUANTIZED = geometry(RowsCache(CacheRole.FULL, (shape(0, 32), shape(1, 32))), layers=2)


@pytest.mark.parametrize("version", VERSIONS)
def test_quantized_rows_are_bit_for_bit_what_mlx_makes_of_them(version: str) -> None:
    state = read_mlx(golden(f"quantized-{version}"), QUANTIZED)
    want = read_tensor_file(golden("dequantized"))
    for rows in state.caches[0].rows:
        name = f"{rows.layer}.{'keys' if rows.tensor is Tensor.KEYS else 'values'}"
        expected = np.ascontiguousarray(want.array(name)[0].transpose(1, 0, 2)).view(np.uint8)
        assert rows.dtype == "bf16"
        assert (rows.data.numpy() == expected.reshape(6, -1)).all()


HYBRID = geometry(
    RowsCache(CacheRole.FULL, (shape(0), shape(2))),
    RecurrentCache(3, (StateLayer(0, 18, 40), StateLayer(1, 18, 40))),
    layers=3,
)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_layer_may_have_attention_and_recurrent_state(version: str) -> None:
    state = read_mlx(golden(f"hybrid-{version}"), HYBRID)
    check(state, CacheRole.FULL, 0, 5, (0, 2))
    assert state.point is not None
    assert state.point.position == 4
    order = [(rows.layer, rows.tensor, rows.dtype) for rows in state.point.rows]
    conv, point = Tensor.CONV, Tensor.STATE
    assert order == [(0, conv, "bf16"), (1, conv, "bf16"), (0, point, "f32"), (1, point, "f32")]
    for rows in state.point.rows:
        if rows.tensor is Tensor.CONV:
            want = made(rows.layer, 2, np.arange(3), 6)[:, 0]
            assert (bf16(rows.data).reshape(3, 6) == want).all()
        else:
            want = made(rows.layer, 3, np.arange(4), 5).transpose(1, 0, 2)
            assert (rows.data.view(torch.float32).numpy().reshape(want.shape) == want).all()


def test_states_of_delta_nets_have_their_axes_exchanged() -> None:
    """mlx-lm keeps [heads, values, keys] of them."""
    renamed = geometry(*HYBRID.caches, layers=3, architecture="qwen3next")
    plain, turned = (read_mlx(golden("hybrid-0.32.2"), each).point for each in (HYBRID, renamed))
    assert plain is not None
    assert turned is not None
    for one, other in zip(plain.rows, turned.rows, strict=True):
        if one.tensor is Tensor.STATE:
            values = one.data.view(torch.float32).view(HEADS, 4, 5)
            assert torch.equal(values.mT.reshape(1, -1), other.data.view(torch.float32))
        else:
            assert torch.equal(one.data, other.data)


def test_keys_that_were_turned_in_neighbouring_pairs_are_put_in_ours() -> None:
    turned = geometry(
        RowsCache(CacheRole.FULL, (shape(0, n_rot=4), shape(1, n_rot=2))), layers=2, architecture="cohere2"
    )
    state = read_mlx(golden("plain-0.32.2"), turned)
    for rows in state.caches[0].rows:
        want = made(rows.layer, 0 if rows.tensor is Tensor.KEYS else 1, np.arange(7))
        if rows.tensor is Tensor.KEYS and rows.layer == 0:
            want = want[..., [0, 2, 1, 3]]
        assert (bf16(rows.data).reshape(want.shape) == want).all()


def test_rows_that_are_stored_multiplied_are_refused() -> None:
    for name in ("falcon-h1", "mimo_v2_flash"):
        with pytest.raises(UnknownFeature, match="multiplied by what"):
            read_mlx(golden("plain-0.32.2"), geometry(*PLAIN.caches, layers=2, architecture=name))


# --- files written here, to be wrong in one thing ---------------------------------------------------


def written(arrays: Mapping[str, Array], said: Mapping[str, str]) -> memoryview:
    names = {"float16": "F16", "float32": "F32", "int32": "I32", "uint32": "U32", "float64": "F64"}
    tensors = {name: (names[array.dtype.name], array) for name, array in arrays.items()}
    return memoryview(b"".join(write_tensor_file(tensors, said)))


def kv(count: int = 3, heads: int = HEADS, size: int = SIZE, dtype: str = "float16") -> Array:
    return np.arange(heads * count * size).reshape(1, heads, count, size).astype(dtype)


ONE = geometry(RowsCache(CacheRole.FULL, (shape(0),)), layers=1)


def meta(name: str, *numbers: str, **arrays: Any) -> memoryview:
    """A file of the older layout with one cache."""
    said = {f"0.0.{at}": number for at, number in enumerate(numbers)} or {"0.0": ""}
    return written({f"0.{place[1:]}": array for place, array in arrays.items()}, {**said, "2.0": name})


def test_the_files_written_here_are_read() -> None:
    state = read_mlx(meta("KVCache", _0=kv(), _1=kv()), ONE)
    assert state.length == 3
    assert [rows.dtype for rows in state.caches[0].rows] == ["f16", "f16"]


@pytest.mark.parametrize(
    ("buffer", "error", "says"),
    [
        (meta("os.system", _0=kv(), _1=kv()), UnknownFeature, "not those of an mlx-lm prompt cache"),
        (meta("BatchKVCache", _0=kv(), _1=kv()), UnknownFeature, "holds a batch of sequences"),
        (meta("KVCache", _0=kv()), Corrupt, "has no values"),
        (meta("KVCache", _0=kv(), _1=kv(), _2=kv()), Corrupt, "none of its class has any"),
        (meta("KVCache", _0=kv(), _1=kv(4)), Corrupt, "none of one cache"),
        (meta("KVCache", _0=kv(0), _1=kv(0)), Corrupt, "none of one cache"),
        (meta("KVCache", _0=kv()[0], _1=kv()), Corrupt, "3 axes"),
        (meta("KVCache", _0=kv().repeat(2, 0), _1=kv()), UnknownFeature, "batch of 2"),
        (meta("KVCache", _0=kv(dtype="float64"), _1=kv()), UnknownFeature, "of F64"),
        (meta("KVCache", _0=kv(size=6), _1=kv()), FingerprintMismatch, "2 heads of 6 values and 4"),
        (meta("KVCache", _0=kv(heads=3), _1=kv(heads=3)), FingerprintMismatch, "3 heads"),
        (meta("KVCache"), FingerprintMismatch, "no rows of a full cache"),
        (meta("KVCache", "7", _0=kv(), _1=kv()), UnknownFeature, "says 1 numbers"),
        (meta("RotatingKVCache", _0=kv(), _1=kv()), UnknownFeature, "says 0 numbers"),
        (meta("RotatingKVCache", "0", "8", "3", "-1", _0=kv(), _1=kv()), Corrupt, "'-1' is said"),
        (meta("RotatingKVCache", "0", "8", "9", "9", _0=kv(), _1=kv()), Corrupt, "says that the next is 9"),
        (meta("RotatingKVCache", "2", "3", "9", "1", _0=kv(), _1=kv()), Corrupt, "says that the next is 1"),
        (meta("RotatingKVCache", "9", "3", "9", "3", _0=kv(), _1=kv()), Corrupt, "more rows than it has"),
        (meta("ChunkedKVCache", "8", "2", _0=kv(), _1=kv()), UnknownFeature, "no other that does"),
        (meta("QuantizedKVCache", "3", "64", "8", _0=kv(), _1=kv()), Corrupt, "no packed keys"),
        (meta("CacheList", _0=kv(), _1=kv()), UnknownFeature, "does not say of which"),
        (meta("ArraysCache", _0=kv()[:, 0], _1=kv()), FingerprintMismatch, "no rows of a full cache"),
    ],
)
def test_a_file_that_is_wrong_in_one_thing_is_refused(
    buffer: memoryview, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_mlx(buffer, ONE)


def test_caches_and_layers_are_matched_or_refused() -> None:
    other = geometry(RowsCache(CacheRole.FULL, (shape(0), shape(5))), layers=6)
    assert read_mlx(golden("plain-0.32.2"), other).caches[0].rows[1].layer == 5
    with pytest.raises(FingerprintMismatch, match="2 caches, and the model 1 layers: a draft"):
        read_mlx(golden("plain-0.32.2"), ONE)
    with pytest.raises(FingerprintMismatch, match="holds recurrent state, and the model's has none"):
        read_mlx(golden("hybrid-0.32.2"), geometry(HYBRID.caches[0], layers=3))
    with pytest.raises(
        FingerprintMismatch, match="layer 0 holds keys and values that the model's has no use"
    ):
        read_mlx(golden("plain-0.32.2"), geometry(RowsCache(CacheRole.FULL, (shape(1),)), layers=2))


def test_recurrent_state_alone_needs_token_ids() -> None:
    """Nothing else says after how many tokens it is."""
    arrays = {"_0": np.ones((1, 3, 6), "float16"), "_1": np.ones((1, 4, 10), "float32")}
    pure = geometry(RecurrentCache(1, (StateLayer(0, 18, 40),)), layers=1)
    with pytest.raises(UnknownFeature, match="save it with its token ids"):
        read_mlx(meta("MambaCache", **arrays), pure)
    state = read_mlx(meta("MambaCache", **arrays), pure, tokens=[5, 6, 7])
    assert state.point is not None
    assert (state.length, state.point.position) == (3, 2)


@pytest.mark.parametrize("text", ["[1,", "{}", "[1.5]", "[true]", "[-1]", "[" * 5000, f"[{2**32}]"])
def test_token_ids_are_a_list_of_them(text: str) -> None:
    said = {"0.tokens": text, "1.0": "KVCache", "2.0": ""}
    with pytest.raises(Corrupt, match="the file"):
        read_mlx(written({"0.0": kv(), "0.1": kv()}, said), ONE)


def test_older_chunked_layers_have_the_length_of_the_full_ones() -> None:
    said = {"0.0.0": "8", "0.0.1": "4", "0.1": "", "2.0": "ChunkedKVCache", "2.1": "KVCache"}
    arrays = {"0.0": kv(12), "0.1": kv(12), "1.0": kv(13), "1.1": kv(13)}
    state = read_mlx(written(arrays, said), CHUNKED)
    assert [cells.positions[[0, -1]].tolist() for cells in state.caches] == [[0, 12], [4, 12]]


def test_latents_may_come_in_two_tensors() -> None:
    latent, turned = kv(heads=1, size=6), -1 - kv(heads=1, size=2)
    first = LayerRows(0, 1, 8, None, n_rot=2, rot_start=0)
    last = LayerRows(0, 1, 8, None, n_rot=2, rot_start=6)
    for layer, parts in ((first, (turned, latent)), (last, (latent, turned))):
        state = read_mlx(
            meta("KVCache", _0=latent, _1=turned), geometry(RowsCache(CacheRole.FULL, (layer,)), layers=1)
        )
        (rows,) = state.caches[0].rows
        want = np.concatenate([part[0, 0] for part in parts], axis=-1)
        assert (rows.data.view(torch.float16).numpy() == want).all()


def test_the_second_cache_of_a_layer_is_its_indexer() -> None:
    said = {
        "0.0.0.0": "KVCache",
        "0.0.0.1": "KVCache",
        "0.0.1.0": "",
        "0.0.1.1": "",
        "2.0": "CacheList",
    }
    arrays = {"0.0.0": kv(), "0.0.1": kv(), "0.1.0": kv(heads=1, size=6), "0.1.1": kv(heads=1, size=1)}
    indexed = geometry(
        RowsCache(CacheRole.FULL, (shape(0),)),
        RowsCache(CacheRole.INDEX, (LayerRows(0, 1, 6, None),)),
        layers=1,
    )
    state = read_mlx(written(arrays, said), indexed)
    (rows,) = state.caches[1].rows
    assert (rows.data.view(torch.float16).numpy() == kv(heads=1, size=6)[0, 0]).all()
    with pytest.raises(FingerprintMismatch, match="that the model's has no use for"):
        read_mlx(written(arrays, said), ONE)


def pairs(**changes: str) -> dict[str, str]:
    return {"model": "tiny", "tokenizer_config": "{}", "chat_template": "", "max_kv_size": "None", **changes}


def test_the_oldest_layout_is_pairs_of_tensors() -> None:
    state = read_mlx(written({"0_keys": kv(), "0_values": kv()}, pairs()), ONE)
    assert (state.length, state.layout, state.notes) == (
        3,
        "mlx-lm pairs",
        ("the file says 'model': 'tiny'",),
    )
    want = kv()[0].transpose(1, 0, 2).reshape(3, -1)
    assert all((rows.data.view(torch.float16).numpy() == want).all() for rows in state.caches[0].rows)
    with pytest.raises(UnknownFeature, match="does not say which of its rows is the last"):
        read_mlx(written({"0_keys": kv(), "0_values": kv()}, pairs(max_kv_size="512")), ONE)
    with pytest.raises(Corrupt, match="'0_more' is of no cache"):
        read_mlx(written({"0_keys": kv(), "0_more": kv()}, pairs()), ONE)
    with pytest.raises(Corrupt, match="missing between"):
        read_mlx(written({"1_keys": kv(), "1_values": kv()}, pairs()), ONE)
    with pytest.raises(Corrupt, match="has no values"):
        read_mlx(written({"0_keys": kv()}, pairs()), ONE)


def test_more_caches_than_any_model_has_are_refused() -> None:
    said = {f"2.{number}": "KVCache" for number in range(5000)}
    with pytest.raises(LimitExceeded, match="5,000 caches"):
        read_mlx(written({}, said), ONE)


def test_a_list_in_a_list_is_refused() -> None:
    said = {"0.0.0.0": "CacheList", "0.0.1.0.0.0": "KVCache", "2.0": "CacheList"}
    with pytest.raises(UnknownFeature, match="'CacheList' is not known here"):
        read_mlx(written({"0.0.0.0": kv(), "0.0.0.1": kv()}, said), ONE)


def test_nothing_is_imported_or_called_by_a_name_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a file made something happen")

    monkeypatch.setattr(socket, "socket", never)
    before = set(sys.modules)
    for name in ("socket.socket", "__import__", "mlx.core", "KVCache.__init__"):
        with pytest.raises(UnknownFeature):
            read_mlx(meta("CacheList", _0=kv(), _1=kv(), **{}), ONE)
        said = json.loads(json.dumps({"1.0": "CacheList", "2.0": "", "2.1.0": "0.0.1", "2.1.1": "string"}))
        arrays = {"0.0.0.0": kv(), "0.0.1": np.array([ord(char) for char in name], "int32")}
        with pytest.raises(UnknownFeature, match="is not known here"):
            read_mlx(written(arrays, said), ONE)
    assert set(sys.modules) == before


@pytest.mark.parametrize("family", ["cohere2", "deepseek_v3", "llama", "mamba", "qwen3_next"])
def test_rows_that_models_of_mlx_lm_made_are_those_that_our_engine_computes(family: str) -> None:
    """Windows that wrapped, keys in neighbouring pairs, latents in two tensors, states of delta nets."""
    path = folder(family)
    data = golden(f"model-{family}")
    said = read_tree(read_tensor_file(data)).said
    if said["weights"] != blake3((path / "model.safetensors").read_bytes()).hexdigest():
        pytest.skip("this torch draws other weights than those that the file was made with")
    engine = base.open_engine(path)
    own = own_geometry_of(engine)
    state = read_mlx(data, own)
    assert state.tokens is not None
    seq = engine.create()
    engine.feed(seq, state.tokens)
    largest = differences(to_rows(state, own, target_of(engine)), engine.snapshot(seq))
    assert len(largest) == len(engine.layout)
    assert max(largest) < 1e-4

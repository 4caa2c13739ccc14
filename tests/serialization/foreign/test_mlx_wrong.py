"""Prompt caches of mlx-lm that are wrong in one thing, or odd in one, written here in every layout."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from engine.errors import Corrupt, FingerprintMismatch, LimitExceeded, UnknownFeature
from serialization.foreign.geometry import CacheRole, LayerRows, RecurrentCache, RowsCache, StateLayer, Window
from serialization.foreign.mlx import read_mlx
from serialization.foreign.tensor_file import Array
from tests.serialization.foreign.mlx_files import (
    CHUNKED,
    HEADS,
    HYBRID,
    KIND,
    LISTED,
    ONE,
    PAIR,
    geometry,
    golden,
    kv,
    letters,
    meta,
    number,
    pairs,
    scalars,
    shape,
    written,
)


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


LIST, KV = ("CacheList",), ("KVCache",)


def test_the_newer_files_written_here_are_read() -> None:
    state = read_mlx(scalars(KV, {"0.2": "scalar"}, **PAIR, _0_2=number(2)), ONE)
    assert state.length == 2
    listed = scalars(LIST, KIND, **LISTED, _0_0_1=letters("KVCache"))
    assert read_mlx(listed, ONE).length == 3


@pytest.mark.parametrize(
    ("buffer", "error", "says"),
    [
        (scalars(KV, {"0.2": "scalar"}, **PAIR, _0_2=number(-1)), Corrupt, "below 0"),
        (scalars(KV, {"0.2": "scalar"}, **PAIR, _0_2=number(2.0, "float32")), Corrupt, "is none"),
        (
            scalars(KV, {"0.2": "scalar"}, **PAIR, _0_2=number([2])),
            Corrupt,
            "'0.2' stands for",
        ),
        (scalars(KV, {"0.2": "scalar"}, **PAIR, _0_2=number(4)), Corrupt, "more rows than it has"),
        (scalars(KV, {"0.2": "array"}, **PAIR, _0_2=number(2)), Corrupt, "something unknown"),
        (scalars(KV, {"0.2": "scalar"}, **PAIR), Corrupt, "or is not there"),
        (
            scalars(KV, {"0.2": "string"}, **PAIR, _0_2=letters("a")),
            Corrupt,
            "a text among its tensors",
        ),
        (scalars(KV, {}, **PAIR, _0_3=kv()), Corrupt, "none of its class has any"),
        (scalars(KV, {}, **PAIR, _1_0=kv()), Corrupt, "of cache '1', and there are 1"),
        (scalars(KV, {}, **PAIR, _00_0=kv()), Corrupt, "of cache '00'"),
        (
            scalars(KV, {"0.0": "none", "0.1": "none"}, **PAIR),
            FingerprintMismatch,
            "no rows of a full",
        ),
        (scalars(("MambaCache",), {}, **PAIR), UnknownFeature, "class 'MambaCache' is not known"),
        (scalars(("ArraysCache",), {}, _0_0_0=kv()[0], _0_1=number([3])), UnknownFeature, "padded"),
        (scalars(LIST, {}, **LISTED), Corrupt, "without a class"),
        (
            scalars(LIST, {}, **LISTED, _0_0_1=letters("KVCache")),
            Corrupt,
            "name of a class, and",
        ),
        (
            scalars(LIST, KIND, **LISTED, _0_0_1=letters("KVCaché")),
            Corrupt,
            "name of a class, and",
        ),
        (
            scalars(LIST, KIND, **LISTED, _0_0_1=letters("K" * 65)),
            Corrupt,
            "name of a class, and",
        ),
        (
            scalars(LIST, KIND, **LISTED, _0_0_1=letters("CacheList")),
            UnknownFeature,
            "not known here",
        ),
        (
            scalars(LIST, KIND, **LISTED, _0_0_1=letters("KVCache"), _0_0_2=kv()),
            Corrupt,
            "more than caches",
        ),
    ],
)
def test_a_newer_file_that_is_wrong_in_one_thing_is_refused(
    buffer: memoryview, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_mlx(buffer, ONE)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"0.0": "", "2.0": "KVCache", "2.2": "KVCache"}, "has gaps"),
        ({"0.0.0": "0", "0.0.2": "8", "2.0": "RotatingKVCache"}, "has gaps"),
        ({"0.0.0": "0", "0.0.1.0": "8", "2.0": "RotatingKVCache"}, "more than texts"),
        ({"0.0.0.0": "KVCache", "0.0.1.0": "", "2.0": "CacheList"}, "caches that it does not name"),
    ],
)
def test_an_older_file_with_a_list_that_is_none_is_refused(said: dict[str, str], says: str) -> None:
    with pytest.raises(Corrupt, match=says):
        read_mlx(written({"0.0": kv(), "0.1": kv()}, said), ONE)


def test_chunked_layers_have_one_length_or_none() -> None:
    said = {"0.0.0": "8", "0.0.1": "4", "0.1": "", "0.2": ""}
    said |= {"2.0": "ChunkedKVCache", "2.1": "KVCache", "2.2": "KVCache"}
    arrays = {"0.0": kv(12), "0.1": kv(12), "1.0": kv(13), "1.1": kv(13), "2.0": kv(14), "2.1": kv(14)}
    three = geometry(RowsCache(CacheRole.FULL, (shape(1), shape(2))), CHUNKED.caches[1], layers=3)
    with pytest.raises(UnknownFeature, match="do not say their length"):
        read_mlx(written(arrays, said), three)


def test_a_list_in_a_list_is_refused() -> None:
    said = {"0.0.0.0": "CacheList", "0.0.1.0.0.0": "KVCache", "2.0": "CacheList"}
    with pytest.raises(UnknownFeature, match="'CacheList' is not known here"):
        read_mlx(written({"0.0.0.0": kv(), "0.0.0.1": kv()}, said), ONE)


@pytest.mark.parametrize("name", ["socket.socket", "__import__", "mlx.core", "KVCache.__init__", "os.system"])
def test_nothing_is_imported_or_called_by_a_name_of_a_file(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UnknownFeature, match="is not known here"):
        read_mlx(scalars(LIST, KIND, **LISTED, _0_0_1=letters(name)), ONE)
    with pytest.raises(UnknownFeature, match="is not known here"):
        read_mlx(scalars(("KVCache", name), {}, **PAIR), ONE)
    with pytest.raises(UnknownFeature, match="is not known here"):
        read_mlx(
            written({"0.0": kv(), "0.1": kv()}, {"0.0": "", "0.1": "", "2.0": "KVCache", "2.1": name}), ONE
        )
    assert set(sys.modules) == before


def packed(bits: int = 8, group: int = 32, dtype: str = "float16", **changes: Array) -> memoryview:
    """A quantized cache of three tokens, of 32 values a head; `k_1` is the second part of its keys."""
    parts = {"_0": np.ones((1, HEADS, 3, bits), "uint32")}
    parts |= {name: np.ones((1, HEADS, 3, 32 // group or 1), dtype) for name in ("_1", "_2")}
    arrays = {f"{letter}{part}": each for letter in "kv" for part, each in parts.items()}
    named = {f"0.{'kv'.index(name[0])}.{name[2:]}": each for name, each in {**arrays, **changes}.items()}
    numbers = {"0.0.0": "3", "0.0.1": str(group), "0.0.2": str(bits)}
    return written(named, {**numbers, "2.0": "QuantizedKVCache"})


WIDE = geometry(RowsCache(CacheRole.FULL, (shape(0, 32),)), layers=1)


def test_the_quantized_files_written_here_are_read() -> None:
    for bits in (4, 8):
        assert read_mlx(packed(bits), WIDE).caches[0].rows[0].data.shape == (3, HEADS * 32 * 2)


@pytest.mark.parametrize(
    ("buffer", "error", "says"),
    [
        (packed(3), UnknownFeature, "quantized to 3 bits in groups of 32 with f16 scales is not read"),
        (packed(6), UnknownFeature, "quantized to 6 bits"),
        (packed(4, dtype="float32"), UnknownFeature, "quantized to 4 bits in groups of 32 with f32 scales"),
        (packed(8, group=16), UnknownFeature, "groups of 16"),
        (packed(8, group=64), Corrupt, "do not fit together"),
        (packed(k_1=np.ones((1, HEADS, 3, 2), "float16")), Corrupt, "have other scales"),
        (packed(k_1=np.ones((1, HEADS, 2, 1), "float16")), Corrupt, "have other scales"),
        (packed(v_2=np.ones((1, HEADS, 3, 2), "float16")), Corrupt, "have other scales"),
        (packed(v_2=np.ones((1, HEADS, 3, 1), "float32")), Corrupt, "do not fit together"),
        (packed(k_0=np.ones((1, HEADS, 3, 8), "float32")), Corrupt, "no packed keys"),
        (packed(k_0=np.ones((1, HEADS, 4, 8), "uint32")), Corrupt, "have other scales"),
        (packed(k_0=np.ones((2, HEADS, 3, 8), "uint32")), UnknownFeature, "batch of 2"),
        (packed(k_1=np.ones((HEADS, 3, 1), "float16")), Corrupt, "3 axes"),
    ],
)
def test_a_quantized_file_that_is_wrong_in_one_thing_is_refused(
    buffer: memoryview, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_mlx(buffer, WIDE)


def test_scales_may_be_any_number() -> None:
    for dtype in ("float16", "float32"):
        scales = np.array([np.inf, np.nan, np.finfo(dtype).max] * HEADS, dtype).reshape(1, HEADS, 3, 1)
        state = read_mlx(packed(8, dtype=dtype, k_1=scales, k_2=-scales), WIDE)
        values = state.caches[0].rows[0].data.numpy().view(dtype)
        assert not np.isfinite(values[:2]).any()


def ring(layer: int, keep: int, slots: int, offset: int, idx: int) -> tuple[dict[str, str], dict[str, Array]]:
    """Metadata and tensors of one ring of the older layout, each slot of which holds its own number."""
    held = np.broadcast_to(np.arange(slots).reshape(1, 1, slots, 1), (1, HEADS, slots, 4)).astype("float16")
    numbers = {f"0.{layer}.{at}": str(each) for at, each in enumerate((keep, slots, offset, idx))}
    return {**numbers, f"2.{layer}": "RotatingKVCache"}, {f"{layer}.{at}": held for at in (0, 1)}


def test_rows_that_a_ring_kept_of_the_beginning_are_left_where_there_is_a_hole_behind() -> None:
    window = geometry(RowsCache(CacheRole.WINDOW, (shape(0),), Window(6)), layers=1)
    said, arrays = ring(0, keep=2, slots=8, offset=20, idx=5)
    (cells,) = read_mlx(written(arrays, said), window).caches
    assert cells.positions.tolist() == [14, 15, 16, 17, 18, 19]
    assert cells.rows[0].data.numpy().view("float16")[:, 0].tolist() == [5, 6, 7, 2, 3, 4]


def test_rows_that_a_ring_kept_are_taken_where_there_is_none() -> None:
    window = geometry(RowsCache(CacheRole.WINDOW, (shape(0),), Window(6)), layers=1)
    said, arrays = ring(0, keep=2, slots=8, offset=8, idx=8)
    assert read_mlx(written(arrays, said), window).caches[0].positions.tolist() == list(range(8))


def test_windows_of_one_cache_hold_the_same_positions() -> None:
    both = geometry(RowsCache(CacheRole.WINDOW, (shape(0), shape(1)), Window(6)), layers=2)
    said, arrays = ring(0, keep=0, slots=8, offset=20, idx=5)
    for slots, offset in ((7, 20), (8, 21)):
        more, others = ring(1, keep=0, slots=slots, offset=offset, idx=5)
        with pytest.raises(Corrupt, match="layers of the window cache hold rows of different positions"):
            read_mlx(written({**arrays, **others}, {**said, **more}), both)


def test_caches_of_one_file_are_of_one_length() -> None:
    said, arrays = ring(0, keep=0, slots=8, offset=20, idx=5)
    both = geometry(
        RowsCache(CacheRole.FULL, (shape(1),)), RowsCache(CacheRole.WINDOW, (shape(0),), Window(6)), layers=2
    )
    full = {"1.0": kv(21), "1.1": kv(21)}
    with pytest.raises(Corrupt, match="of different lengths: 20, 21 tokens"):
        read_mlx(written({**arrays, **full}, {**said, "0.1": "", "2.1": "KVCache"}), both)


def test_a_chunked_window_needs_the_rows_of_its_chunk() -> None:
    """Of 13 tokens those from 8 on: the last begun chunk of 8."""
    for start in (8, 9):
        said = {"0.0.0": "8", "0.0.1": str(start), "0.1": "", "2.0": "ChunkedKVCache", "2.1": "KVCache"}
        arrays = {"0.0": kv(13 - start), "0.1": kv(13 - start), "1.0": kv(13), "1.1": kv(13)}
        if start == 8:
            assert read_mlx(written(arrays, said), CHUNKED).caches[1].positions.tolist() == [8, 9, 10, 11, 12]
            continue
        with pytest.raises(Corrupt, match="needed from token 8 on, and none is there before 9"):
            read_mlx(written(arrays, said), CHUNKED)

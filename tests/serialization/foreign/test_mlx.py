"""Prompt caches that mlx-lm wrote, of every class and layout: each row is the one it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3

from engine.errors import Corrupt, UnknownFeature
from serialization.foreign.convert import to_rows
from serialization.foreign.foreign_state import ForeignState, Rotation, Tensor, ValueOrder
from serialization.foreign.geometry import (
    CacheRole,
    RowsCache,
    Window,
)
from serialization.foreign.held import Floats
from serialization.foreign.mlx import read_mlx, rows_of
from serialization.foreign.mlx_tree import META, SCALARS, read_tree
from serialization.foreign.tensor_file import Array, read_tensor_file
from sessions.migrate.geometry import own_geometry_of, target_of
from tests.exact.members import folder
from tests.oracles import base
from tests.serialization.foreign.mlx_files import (
    CHUNKED,
    HEADS,
    HYBRID,
    PLAIN,
    QUANTIZED,
    SIZE,
    WINDOWS,
    geometry,
    golden,
    shape,
)
from tests.serialization.foreign.test_torch_dump import differences

VERSIONS = ("0.31.3", "0.32.2")
LAYOUT = {"0.28.0": META, "0.31.3": META, "0.32.2": SCALARS}


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


def test_a_chunked_layer_begins_where_its_front_was_cut() -> None:
    state = read_mlx(golden("chunks-0.32.2"), CHUNKED)
    check(state, CacheRole.FULL, 0, 13, (1,))
    check(state, CacheRole.WINDOW, 4, 13, (0,))


@pytest.mark.parametrize("version", VERSIONS)
def test_quantized_rows_are_bit_for_bit_what_mlx_makes_of_them(version: str) -> None:
    state = read_mlx(golden(f"quantized-{version}"), QUANTIZED)
    want = read_tensor_file(golden("dequantized"))
    for rows in state.caches[0].rows:
        name = f"{rows.layer}.{'keys' if rows.tensor is Tensor.KEYS else 'values'}"
        expected = np.ascontiguousarray(want.array(name)[0].transpose(1, 0, 2)).view(np.uint8)
        assert rows.dtype == "bf16"
        assert (rows.data.numpy() == expected.reshape(6, -1)).all()


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


@pytest.mark.parametrize("name", ["cohere2", "llama4", "llama4_text"])
def test_keys_that_were_turned_in_neighbouring_pairs_are_put_in_ours(name: str) -> None:
    turned = geometry(
        RowsCache(CacheRole.FULL, (shape(0, n_rot=4), shape(1, n_rot=2))), layers=2, architecture=name
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

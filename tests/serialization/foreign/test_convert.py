"""A foreign state's cells as rows by position, and back, by the table of what is kept, converted and
dropped."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.errors import Corrupt, FingerprintMismatch, Unsupported
from engine.state import Layout, PartKind, PartSpec
from serialization.foreign.conversion import Fate
from serialization.foreign.convert import SPARE_ROWS, Converted, to_rows
from serialization.foreign.foreign_state import (
    ForeignCells,
    ForeignPoint,
    ForeignRows,
    ForeignState,
    Rotation,
    Tensor,
    ValueOrder,
)
from serialization.foreign.geometry import CacheRole, Geometry, LayerRows, Pairing, RowsCache, Window
from serialization.foreign.outward import Wanted, to_foreign
from serialization.foreign.target import Target, foreign_form, may_be_rotated
from serialization.values import encode

HEADS, SIZE, WINDOW = 2, 64, 8
LENGTH = 40
FULL = RowsCache(
    CacheRole.FULL, (LayerRows(0, HEADS, SIZE, SIZE, SIZE), LayerRows(2, HEADS, SIZE, SIZE, SIZE))
)
SLIDING = RowsCache(CacheRole.WINDOW, (LayerRows(1, HEADS, SIZE, SIZE, SIZE),), Window(WINDOW))
PLAIN = Geometry("llama", 300, 3, (FULL,), pairing=Pairing.INTERLEAVED)
WINDOWED = Geometry("gemma3", 300, 3, (FULL, SLIDING))
TOKENS = tuple(range(LENGTH))


def layout(geometry: Geometry, type_k: str = "f16", type_v: str = "f16") -> Layout:
    parts = []
    for cache in geometry.caches:
        assert isinstance(cache, RowsCache)
        window = None if cache.window is None else cache.window.size
        kind = PartKind.TOKEN if window is None else PartKind.WINDOW
        for layer in cache.layers:
            for name, dtype in (("kv.k", type_k), ("kv.v", type_v)):
                shape = (HEADS, SIZE)
                parts.append(
                    PartSpec(f"{name}.{layer.layer:02}", kind, layer.layer, dtype, shape, window=window)
                )
    return tuple(sorted(parts, key=lambda part: (part.kind is PartKind.WINDOW, part.layer, part.name)))


def target(geometry: Geometry, type_k: str = "f16", type_v: str = "f16") -> Target:
    specs = layout(geometry, type_k, type_v)
    return Target(specs, {spec.name: SIZE for spec in specs if spec.dtype.startswith("q")})


def cells(cache: RowsCache, positions: list[int], type_k: str = "f16", type_v: str = "f16") -> ForeignCells:
    rows = []
    for layer in cache.layers:
        for tensor, dtype in ((Tensor.KEYS, type_k), (Tensor.VALUES, type_v)):
            rng = torch.Generator().manual_seed(10 * layer.layer + (tensor is Tensor.KEYS))
            every = encode(dtype, torch.randn(LENGTH, HEADS * SIZE, generator=rng))
            rows.append(ForeignRows(layer.layer, tensor, dtype, every[positions]))
    return ForeignCells(cache.role, np.array(positions, np.int64), tuple(rows))


def state(*caches: ForeignCells, **changes: object) -> ForeignState:
    made = ForeignState("a file", "3", TOKENS, caches, rotation=Rotation.NONE)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def shuffled(positions: range) -> list[int]:
    return np.random.default_rng(0).permutation(np.array(positions)).tolist()


def same(a: Converted, b: Converted) -> bool:
    pairs = [pair for x, y in zip(a.rows, b.rows, strict=True) for pair in zip(x.parts, y.parts, strict=True)]
    return all(torch.equal(x, y) for x, y in pairs)


def test_rows_are_in_the_order_of_positions_wherever_their_cells_were() -> None:
    straight = to_rows(state(cells(FULL, list(range(LENGTH)))), PLAIN, target(PLAIN))
    assert straight.length == LENGTH
    assert same(to_rows(state(cells(FULL, shuffled(range(LENGTH)))), PLAIN, target(PLAIN)), straight)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("geometry", [PLAIN, WINDOWED])
def test_what_comes_in_goes_out_again_bit_for_bit(geometry: Geometry, dtype: str) -> None:
    caches = [cells(FULL, list(range(LENGTH)), dtype, dtype)]
    if geometry is WINDOWED:
        caches.append(cells(SLIDING, list(range(LENGTH - WINDOW, LENGTH)), dtype, dtype))
    given = state(*caches)
    ours = to_rows(given, geometry, target(geometry, dtype, dtype))
    assert ours.conversion.exact
    assert {change.fate for change in ours.conversion.changes} == {Fate.KEPT}
    wanted = Wanted(dtype, dtype)
    back, conversion = to_foreign("us", target(geometry, dtype, dtype), geometry, ours.rows, TOKENS, wanted)
    assert conversion.exact
    for mine, theirs in zip(back.caches, given.caches, strict=True):
        assert mine.positions.tolist() == theirs.positions.tolist()
        there = {(rows.layer, rows.tensor): rows for rows in theirs.rows}
        for rows in mine.rows:
            assert rows.dtype == dtype
            assert torch.equal(rows.data, there[rows.layer, rows.tensor].data)


def test_rows_in_our_own_order_are_not_put_in_another() -> None:
    given = state(cells(FULL, list(range(LENGTH))), order=ValueOrder.OURS)
    ours = to_rows(given, PLAIN, target(PLAIN))
    assert torch.equal(ours.rows[0].parts[0], given.caches[0].rows[0].data)


def test_another_dtype_is_told_with_its_loss() -> None:
    given = state(cells(FULL, list(range(LENGTH))))
    ours = to_rows(given, PLAIN, target(PLAIN, "f32", "bf16"))
    keys, values = ours.conversion.changes
    assert (keys.fate, keys.what, keys.loss) == (Fate.CONVERTED, "keys of 2 layers", 0.0)
    assert keys.why == "f16 to f32, RoPE's pairs in another order"
    assert (values.fate, values.why) == (Fate.CONVERTED, "f16 to bf16")
    assert 0 < values.loss < 4e-3
    assert not ours.conversion.exact
    assert ours.conversion.loss == values.loss


def test_rotated_values_in_the_same_blocks_are_kept() -> None:
    given = state(cells(FULL, list(range(LENGTH)), "f16", "q8_0"), rotation=Rotation.ROTATED)
    ours = to_rows(given, PLAIN, target(PLAIN, "f16", "q8_0"))
    assert ours.conversion.exact
    there = next(rows for rows in given.caches[0].rows if rows.tensor is Tensor.VALUES)
    assert torch.equal(ours.rows[0].parts[1], there.data)


def test_rows_that_were_not_rotated_are_rotated() -> None:
    given = state(cells(FULL, list(range(LENGTH)), "f16", "q8_0"), rotation=Rotation.NONE)
    ours = to_rows(given, PLAIN, target(PLAIN, "f16", "q8_0"))
    assert ours.conversion.changes[1].why == "every 64 values rotated"
    assert 0 < ours.conversion.loss < 1e-2


def test_a_rotation_that_nobody_told_is_asked_for() -> None:
    given = state(cells(FULL, list(range(LENGTH)), "f16", "q8_0"), rotation=Rotation.UNKNOWN)
    assert may_be_rotated(given, PLAIN)
    with pytest.raises(Unsupported, match="rotated"):
        to_rows(given, PLAIN, target(PLAIN, "f16", "q8_0"))
    assert to_rows(given, PLAIN, target(PLAIN, "f16", "q8_0"), Rotation.ROTATED).conversion.exact


@pytest.mark.parametrize(
    ("size", "keys", "values"),
    [(64, 64, 64), (96, 0, 0), (128, 128, 64), (192, 64, 64), (256, 256, 64), (32, 0, 0)],
)
def test_llama_cpp_rotates_keys_by_as_many_values_as_it_can_and_values_by_64(
    size: int, keys: int, values: int
) -> None:
    layer = LayerRows(0, HEADS, size, size, size)
    for tensor, block in ((Tensor.KEYS, keys), (Tensor.VALUES, values)):
        for dtype, rotated in (("q8_0", True), ("q8_0", False), ("f16", True)):
            form = foreign_form(layer, tensor, dtype, ValueOrder.GGML, Pairing.HALVES, rotated)
            assert form.block == (block if dtype == "q8_0" and rotated else 0)
        assert foreign_form(layer, tensor, "q8_0", ValueOrder.OURS, Pairing.HALVES, True).block == 0


def test_plain_rows_are_never_rotated_whatever_is_told() -> None:
    given = state(cells(FULL, list(range(LENGTH))), rotation=Rotation.UNKNOWN)
    assert not may_be_rotated(given, PLAIN)
    assert to_rows(given, PLAIN, target(PLAIN)).conversion.exact


def test_of_window_rows_no_more_are_taken_than_are_of_use() -> None:
    given = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, list(range(LENGTH))))
    ours = to_rows(given, WINDOWED, target(WINDOWED))
    assert ours.window_start == LENGTH - WINDOW - SPARE_ROWS


@pytest.mark.parametrize("before", [[*range(20)], [*range(5), *range(10, 20)]], ids=["one", "two"])
def test_window_rows_begin_behind_the_last_hole(before: list[int]) -> None:
    positions = [*before, *range(LENGTH - WINDOW - 2, LENGTH)]
    given = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, positions))
    ours = to_rows(given, WINDOWED, target(WINDOWED))
    assert ours.window_start == LENGTH - WINDOW - 2


def test_layers_that_were_in_one_cache_are_found_there() -> None:
    one = WINDOWED.merged()
    (cache,) = one.caches
    assert isinstance(cache, RowsCache)
    ours = to_rows(state(cells(cache, list(range(LENGTH)))), WINDOWED, target(WINDOWED))
    apart = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, list(range(LENGTH))))
    assert same(ours, to_rows(apart, WINDOWED, target(WINDOWED)))


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([*range(10), *range(11, LENGTH)], "position 10 is missing"),
        (list(range(1, LENGTH)), "position 0 is missing"),
        ([0, *range(LENGTH)], "position 0 is there twice"),
        ([-1, *range(LENGTH)], "position -1"),
    ],
)
def test_positions_that_are_no_whole_conversation_are_refused(positions: list[int], said: str) -> None:
    with pytest.raises(Corrupt, match=said):
        to_rows(state(cells(FULL, positions)), PLAIN, target(PLAIN))


def test_recurrent_state_of_another_position_than_the_rows_end_at_is_refused() -> None:
    spec = PartSpec("mamba.conv.00", PartKind.POINT, 0, "f32", (4,))
    goal = Target((*layout(PLAIN), spec), {})
    point = ForeignPoint(
        LENGTH - 2, (ForeignRows(0, Tensor.CONV, "f32", torch.zeros(1, 16, dtype=torch.uint8)),)
    )
    given = state(cells(FULL, list(range(LENGTH))), point=point, order=ValueOrder.OURS)
    with pytest.raises(Corrupt, match="after 39 of 40 tokens"):
        to_rows(given, PLAIN, goal)


def test_caches_that_end_at_different_positions_are_refused() -> None:
    given = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, list(range(LENGTH - 1))))
    with pytest.raises(Corrupt, match="ends at position 38, another at 39"):
        to_rows(given, WINDOWED, target(WINDOWED))
    empty = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, []))
    with pytest.raises(Corrupt, match="no cells"):
        to_rows(empty, WINDOWED, target(WINDOWED))


def test_windows_that_lack_rows_are_refused() -> None:
    given = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, list(range(LENGTH - WINDOW + 2, LENGTH))))
    with pytest.raises(Corrupt, match="needed from token 32 on, and there are none before 34"):
        to_rows(given, WINDOWED, target(WINDOWED))


def test_zeros_stand_for_the_row_of_a_window_that_no_token_sees_again() -> None:
    given = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, list(range(LENGTH - WINDOW + 1, LENGTH))))
    found = to_rows(given, WINDOWED, target(WINDOWED))
    (windows,) = [rows for rows in found.rows if rows.kind is PartKind.WINDOW]
    assert (windows.start, windows.stop, found.unseen) == (LENGTH - WINDOW, LENGTH, 1)
    assert found.window_start == LENGTH - WINDOW + 1
    for part in windows.parts:
        assert len(part) == WINDOW
        assert not part[0].any()


def test_a_window_that_is_not_full_yet_has_every_row() -> None:
    for length, good in ((WINDOW - 1, False), (WINDOW, True)):
        given = state(cells(FULL, list(range(length))), cells(SLIDING, list(range(1, length))))
        if good:
            assert to_rows(given, WINDOWED, target(WINDOWED)).unseen == 1
            continue
        with pytest.raises(Corrupt, match="needed from token 0 on, and there are none before 1"):
            to_rows(given, WINDOWED, target(WINDOWED))


def test_a_window_of_rows_is_not_enough_for_a_memory_that_keeps_all() -> None:
    given = state(cells(FULL, list(range(LENGTH))), cells(SLIDING, list(range(LENGTH - WINDOW, LENGTH))))
    specs = tuple(dataclasses.replace(spec, kind=PartKind.TOKEN, window=None) for spec in layout(WINDOWED))
    with pytest.raises(Corrupt, match="every token, and there are none before 32"):
        to_rows(given, WINDOWED, Target(specs, {}))


def test_a_layer_that_is_not_there_and_one_that_is_twice() -> None:
    given = cells(FULL, list(range(LENGTH)))
    with pytest.raises(FingerprintMismatch, match="no v rows of layer 2"):
        to_rows(state(dataclasses.replace(given, rows=given.rows[:-1])), PLAIN, target(PLAIN))
    with pytest.raises(Corrupt, match="twice"):
        to_rows(state(dataclasses.replace(given, rows=(*given.rows, given.rows[0]))), PLAIN, target(PLAIN))


def test_a_tensor_without_a_row_for_each_cell_is_refused() -> None:
    given = cells(FULL, list(range(LENGTH)))
    short = dataclasses.replace(given.rows[0], data=given.rows[0].data[1:])
    with pytest.raises(Corrupt, match="not one for each cell"):
        to_rows(state(dataclasses.replace(given, rows=(short, *given.rows[1:]))), PLAIN, target(PLAIN))


def test_rows_of_parts_that_nobody_else_has_are_refused_by_name() -> None:
    block = PartSpec("csa.k.00", PartKind.BLOCK, 0, "f16", (SIZE,), block=4)
    with pytest.raises(Unsupported, match="block rows"):
        to_rows(state(cells(FULL, list(range(LENGTH)))), PLAIN, Target((*layout(PLAIN), block), {}))
    odd = PartSpec("odd.k.00", PartKind.TOKEN, 0, "f16", (HEADS, SIZE))
    with pytest.raises(Unsupported, match=r"odd\.k"):
        to_rows(state(cells(FULL, list(range(LENGTH)))), PLAIN, Target((odd,), {}))


def test_what_the_memory_has_no_part_for_is_told() -> None:
    given = dataclasses.replace(cells(FULL, list(range(LENGTH))), extension=np.zeros((LENGTH, 2), np.int32))
    specs = tuple(spec for spec in layout(PLAIN) if spec.layer == 0)
    ours = to_rows(state(given, notes=("outputs of 3 tokens",)), PLAIN, Target(specs, {}))
    dropped = [change.what for change in ours.conversion.of(Fate.DROPPED)]
    assert dropped == ["2 tensors of rows", "what cells say beside their position", "outputs of 3 tokens"]


def test_rows_that_are_not_all_there_do_not_go_out() -> None:
    ours = to_rows(state(cells(FULL, list(range(LENGTH)))), PLAIN, target(PLAIN))
    cut = [
        dataclasses.replace(run, start=1, parts=tuple(part[1:] for part in run.parts)) for run in ours.rows
    ]
    with pytest.raises(Corrupt, match="needed from token 0 on, and 0 is missing"):
        to_foreign("us", target(PLAIN), PLAIN, cut, TOKENS, Wanted("f16", "f16"))


def test_an_empty_state_has_no_rows() -> None:
    ours = to_rows(state(cells(FULL, [])), PLAIN, target(PLAIN))
    assert (ours.length, ours.rows) == (0, ())

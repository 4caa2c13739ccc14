"""Quantized rows are those of GGUF, bit for bit; the rotation before them is its own inverse."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from engine.cache.memory import KEYS, MemoryNeeds, MemorySpec, RowsSpec, Turned
from engine.cache.quant import Hadamard, decode, encode, hadamard_block
from engine.cache.rows import RowBuffer, Slot
from engine.cache.table import build_memory
from engine.errors import ConfigError
from tests.engine.cache import members
from tests.engine.cache.harness import CPU, A, dense, feed, layers_of, queries, rotary, spec

QUANTIZED = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


def samples() -> np.ndarray:
    """float32 [n, 96]: usual rows, tiny and huge ones, ties, signs, zeros."""
    random = np.random.default_rng(0)
    usual = random.standard_normal((200, 96))
    scaled = random.standard_normal((50, 96)) * 10.0 ** random.integers(-6, 4, (50, 1))
    whole = random.integers(-127, 128, (50, 96)) / 2
    whole[:, ::32] = 127  # a scale of exactly 1, so that halves are ties
    outlier = random.standard_normal((20, 96))
    outlier[:, 5] *= 100
    flat = np.stack((np.zeros(96), np.full(96, 1.5), np.full(96, -2.0), np.tile([1.0, -1.0], 48)))
    return np.concatenate((usual, scaled, whole, outlier, flat)).astype(np.float32)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_blocks_are_ggufs_bit_for_bit(dtype: str) -> None:
    rows = samples()
    ours = encode(dtype, torch.from_numpy(rows))
    theirs = quantize(rows, QUANTIZED[dtype])
    assert ours.dtype == torch.uint8
    assert np.array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_values_are_ggufs_bit_for_bit(dtype: str) -> None:
    stored = quantize(samples(), QUANTIZED[dtype])
    ours = decode(dtype, torch.from_numpy(stored), torch.float32).numpy()
    theirs = dequantize(stored, QUANTIZED[dtype])
    assert np.array_equal(ours.view(np.uint32) & 0x7FFFFFFF, theirs.view(np.uint32) & 0x7FFFFFFF)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_lone_block_is_read_wherever_it_lies(dtype: str) -> None:
    stored = encode(dtype, torch.from_numpy(samples()[:, :32]))
    together = decode(dtype, stored, torch.float32)
    for row in range(5):
        assert torch.equal(decode(dtype, stored[row : row + 1], torch.float32), together[row : row + 1])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_no_rows_are_rows_too(dtype: str) -> None:
    none = encode(dtype, torch.zeros((1, 64)))[:0]
    assert decode(dtype, none, torch.bfloat16).shape == (0, 64)


def test_blocks_of_a_rotation_are_powers_of_two_that_divide_every_size() -> None:
    sizes = {32: 32, 64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256, 320: 64, 576: 64, 7: 1}
    assert {size: hadamard_block([size]) for size in sizes} == sizes
    assert hadamard_block([576, 512]) == 64
    assert hadamard_block([256, 96]) == 32


@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_the_rotation_is_its_own_inverse_and_keeps_scores(size: int) -> None:
    rotation = Hadamard(hadamard_block([size]), CPU)
    x, y = torch.randn((2, 40, 3, size))
    assert torch.allclose(rotation.rotate(rotation.rotate(x)), x, atol=1e-5)
    assert torch.allclose((rotation.rotate(x) * rotation.rotate(y)).sum(-1), (x * y).sum(-1), atol=1e-3)
    assert not torch.allclose(rotation.rotate(x), x, atol=0.5)


def test_the_rotation_spreads_outliers() -> None:
    x = torch.randn((100, 1, 64), generator=torch.Generator().manual_seed(0))
    x[:, :, 3] *= 30
    rotated = RowBuffer(100, 1, 64, "q4_0", torch.float32, CPU, "type_k", Hadamard(64, CPU))
    slot = Slot(0, 100, None)
    rotated.write(slot, x)
    plain = decode("q4_0", encode("q4_0", x), torch.float32)
    others = torch.arange(64) != 3
    error = (rotated.read_plain(slot) - x)[..., others].square().mean()
    assert error < (plain - x)[..., others].square().mean() / 1.5


@pytest.mark.parametrize("field", ["type_k", "type_v"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_head_sizes_that_blocks_do_not_divide_are_refused_by_the_settings_name(
    dtype: str, field: str
) -> None:
    types = (dtype, "f32") if field == "type_k" else ("f32", dtype)
    with pytest.raises(ConfigError, match=rf"^{field} = '{dtype}': .* 32, not 40"):
        build_memory(spec(size=40, types=types))


def test_types_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="type_v = 'q3_k'"):
        build_memory(spec(types=("f32", "q3_k")))
    with pytest.raises(ConfigError, match="type_k = 'i64'"):
        build_memory(spec(types=("i64", "f32")))


#: the error that a row type may add to attention over unit normal rows
ERRORS = {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2, "q5_0": 0.12, "q4_0": 0.25}


@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("letter", ["k", "v"])
@pytest.mark.parametrize("dtype", ERRORS)
def test_every_row_type_of_keys_and_values_gives_attention_of_its_own_precision(
    dtype: str, letter: str, size: int
) -> None:
    memory_spec: MemorySpec = spec(
        size=size, heads=2, types=(dtype, "f32") if letter == "k" else ("f32", dtype)
    )
    memory = build_memory(memory_spec)
    assert memory.rotated == ((f"kv.{letter}",) if dtype in QUANTIZED and size == 64 else ())
    tokens = range(30)
    layer = layers_of(memory_spec)[0]
    ((out,),) = feed(memory_spec, memory, (A, tokens))
    ((last,),) = feed(memory_spec, memory, (A, [30]))
    expected = dense(queries(range(31), layer, 4), range(31), range(31), range(31), layer)
    # Scores of such rows spread like the square root of their size: it is the share of keys that errs.
    scale = expected.std() * (size**0.5 / 2 if letter == "k" else 1)
    error = (torch.cat((out, last)).double() - expected).abs().mean()
    assert error < ERRORS[dtype] * scale


def test_parts_say_how_rows_are_stored() -> None:
    layout = build_memory(spec(size=64, heads=3, types=("q8_0", "bf16"))).layout
    assert [(part.name, part.dtype, part.shape, part.row_nbytes) for part in layout] == [
        ("kv.k.00", "q8_0", (3, 64), 3 * 2 * 34),
        ("kv.v.00", "bf16", (3, 64), 3 * 64 * 2),
    ]


def latent_spec(size: int, value_size: int, dtype: str) -> MemorySpec:
    """Keys that hold the values, RoPE behind these."""
    turned = Turned(rotary(size - value_size), value_size)
    part = RowsSpec(KEYS, 0, 1, size, turned=turned, value_size=value_size)
    return replace(spec(types=(dtype, "f32")), needs=MemoryNeeds("kv", (part,)))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("size", "value_size"), [(192, 128), (576, 512), (128, 64), (96, 64)])
def test_values_within_keys_are_closed_under_the_rotation(size: int, value_size: int, dtype: str) -> None:
    memory_spec = latent_spec(size, value_size, dtype)
    memory = build_memory(memory_spec)
    rotates = dtype in QUANTIZED and size != 96
    assert memory.rotated == (("kv.k",) if rotates else ())
    (need,) = memory_spec.needs.parts
    assert isinstance(need, RowsSpec)
    seen = [*members.feed(memory_spec, memory, (A, range(30))), *members.feed(memory_spec, memory, (A, [30]))]
    k = members.rows_of(need, range(31), range(31))
    sight = members.visible_to(range(31), range(31), None)
    q = members.queries(need, range(31))
    expected = members.definition(q, k, k[..., :value_size], sight, members.SCALE)
    out = torch.cat([one.attended[0] for one in seen])
    assert out.shape == (31, members.GROUP, value_size)
    error = (out.double() - expected).abs().mean()
    assert error < ERRORS[dtype] * expected.std() * size**0.5 / 2


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_0"])
def test_a_shift_of_keys_leaves_the_values_within_them(dtype: str) -> None:
    memory_spec = latent_spec(192, 128, dtype)
    memory = build_memory(memory_spec)
    (need,) = memory_spec.needs.parts
    assert isinstance(need, RowsSpec)
    members.feed(memory_spec, memory, (A, range(20)))
    memory.discard(A, 3, 8)
    tokens = [0, 1, 2, *range(8, 20)]
    part = memory._parts.rows[KEYS, 0]
    rows = part.buffer.read_plain(Slot.of(part.table.cells_of(A), CPU))
    expected = members.rows_of(need, tokens, range(15))
    loss = {"f32": 1e-6, "q8_0": 1e-2, "q4_0": 0.2}[dtype]
    for values in (slice(0, 128), slice(128, 192)):
        error = (rows - expected)[..., values].norm() / expected[..., values].norm()
        assert error < loss


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_rows_in_a_rotated_basis_are_rotated_whatever_the_dtype(dtype: str) -> None:
    memory = build_memory(members.member_spec("dsa", size=128, types=(dtype, "f32")))
    rotated = {part.need.name for part in memory._parts.stored if part.buffer.hadamard is not None}
    assert rotated == {"idx.k"} | ({"kv.k"} if dtype == "q8_0" else set())
    assert set(memory.rotated) == rotated

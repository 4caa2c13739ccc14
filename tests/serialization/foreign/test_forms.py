"""From one way to write rows down to another: what is exact is exact, and what is lost is told."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.cache.quant import Hadamard
from engine.errors import FingerprintMismatch
from serialization.foreign.forms import Form, move
from serialization.foreign.geometry import Pairing
from serialization.values import decode, encode

HEADS, SIZE = 3, 64


def form(dtype: str = "f16", **changes: object) -> Form:
    return dataclasses.replace(Form(dtype, HEADS, SIZE, n_rot=SIZE), **changes)  # type: ignore[arg-type]


def rows(dtype: str, count: int = 5) -> torch.Tensor:
    torch.manual_seed(1)
    return encode(dtype, torch.randn(count, HEADS * SIZE))


PAIRED = {"pairing": Pairing.INTERLEAVED}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q5_0", "q4_0"])
def test_rows_of_one_form_are_kept_bit_for_bit(dtype: str) -> None:
    data = rows(dtype)
    moved = move(data, form(dtype), form(dtype))
    assert torch.equal(moved.data, data)
    assert moved.loss == 0.0


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("n_rot", [2, 24, SIZE])
def test_the_order_of_pairs_is_changed_without_a_loss_and_back(dtype: str, n_rot: int) -> None:
    data = torch.randint(0, 256, rows(dtype).shape, dtype=torch.uint8)  # signalling NaNs and all
    paired, halved = form(dtype, n_rot=n_rot, **PAIRED), form(dtype, n_rot=n_rot)
    moved = move(data, paired, halved)
    assert moved.loss == 0.0
    assert torch.equal(move(moved.data, halved, paired).data, data)
    assert not torch.equal(moved.data, data) or n_rot == 2


def test_pairs_become_halves_value_by_value() -> None:
    data = encode("f32", torch.arange(HEADS * SIZE).float()[None])
    moved = decode("f32", move(data, form("f32", n_rot=8, **PAIRED), form("f32", n_rot=8)).data)
    assert moved[0, :10].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    assert moved[0, SIZE : SIZE + 8].tolist() == [SIZE + i for i in (0, 2, 4, 6, 1, 3, 5, 7)]


def test_what_holds_every_value_loses_none() -> None:
    moved = move(rows("f16"), form("f16"), form("f32"))
    assert moved.loss == 0.0
    assert torch.equal(move(moved.data, form("f32"), form("f16")).data, rows("f16"))


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [("bf16", 1e-4, 4e-3), ("q8_0", 1e-3, 1e-2), ("q5_0", 1e-2, 6e-2), ("q4_0", 3e-2, 1.2e-1)],
)
def test_what_does_not_tells_how_much_it_lost(dtype: str, least: float, most: float) -> None:
    data = rows("f32")
    moved = move(data, form("f32"), form(dtype))
    wanted, got = decode("f32", data).double(), decode(dtype, moved.data).double()
    assert moved.loss == pytest.approx(float((got - wanted).norm() / wanted.norm()))
    assert least < moved.loss < most


def test_f32_rows_that_came_from_f16_go_back_without_a_loss() -> None:
    wide = encode("f32", decode("f16", rows("f16")))
    assert move(wide, form("f32"), form("f16")).loss == 0.0


def test_a_rotation_is_the_engines() -> None:
    data = rows("f32")
    rotated = move(data, form("f32"), form("f32", block=SIZE))
    wanted = Hadamard(SIZE, torch.device("cpu")).rotate(decode("f32", data).view(-1, HEADS, SIZE))
    assert torch.equal(decode("f32", rotated.data).view(wanted.shape), wanted)


def test_rotated_quantized_pairs_are_put_in_order_within_the_loss_of_one_more_quantization() -> None:
    """Values in order, rotated and quantized once, against those that were quantized, put in order, and
    quantized again."""
    data = rows("f32")
    plain, stored = form("f32", **PAIRED), form("q8_0", block=SIZE, **PAIRED)
    there = move(data, plain, stored)
    ours = move(there.data, stored, form("q8_0", block=SIZE))
    wanted = decode("f32", move(data, plain, form("f32")).data)
    got = decode("f32", move(ours.data, form("q8_0", block=SIZE), form("f32")).data)
    assert 0 < ours.loss < 1e-2
    assert float((got - wanted).norm() / wanted.norm()) < 2 * there.loss


def test_another_block_of_rotation_is_another_form() -> None:
    data = rows("f32")
    moved = move(data, form("f32", block=32), form("f32", block=64))
    back = decode("f32", move(moved.data, form("f32", block=64), form("f32", block=32)).data)
    assert not torch.equal(moved.data, data)
    assert torch.allclose(back, decode("f32", data), atol=1e-5)


def test_beyond_what_a_dtype_can_say_the_loss_is_infinite() -> None:
    data = encode("f32", torch.full((1, HEADS * SIZE), 1e6))
    assert move(data, form("f32"), form("f16")).loss == float("inf")


@pytest.mark.parametrize("other", [{"heads": 1}, {"size": 32, "n_rot": 32}, {"n_rot": 32}])
def test_rows_of_another_size_are_refused(other: dict[str, int]) -> None:
    with pytest.raises(FingerprintMismatch):
        move(rows("f16"), form("f16"), form("f16", **other))


def test_rows_of_another_dtype_than_they_say_are_refused() -> None:
    with pytest.raises(FingerprintMismatch, match="384 are expected"):
        move(rows("f32"), form("f16"), form("f16"))

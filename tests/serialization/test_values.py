"""Rows as numbers and back: to the bit what the engine does to them."""

from __future__ import annotations

import pytest
import torch

from engine.cache import quant
from engine.errors import ConfigError
from serialization.values import decode, encode, is_quantized

QUANTIZED = ("q8_0", "q5_0", "q4_0")


def rows() -> torch.Tensor:
    """Of many sizes, with blocks of zeros, of one value, and of halves that are rounded away from zero."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 1e-3, 1e-7, 300.0]).repeat_interleave(40)[:, None]
    values = torch.randn(160, 96) * sizes
    values[3] = 0
    values[4] = values[4, 0]
    values[5] = torch.round(values[5] * 2) / 2
    return values


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_rows_are_those_of_the_engine(dtype: str) -> None:
    values = rows()
    stored = encode(dtype, values)
    assert torch.equal(stored, quant.encode(dtype, values))
    assert torch.equal(decode(dtype, stored), quant.decode(dtype, stored, torch.float32))
    assert is_quantized(dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_plain_rows_come_back_as_they_are_stored(dtype: str) -> None:
    stored = encode(dtype, rows())
    assert torch.equal(encode(dtype, decode(dtype, stored)), stored)
    assert not is_quantized(dtype)


def test_rows_at_an_odd_address_are_read_all_the_same() -> None:
    stored = encode("f32", rows())
    odd = torch.empty(stored.numel() + 1, dtype=torch.uint8)[1:].view(stored.shape).copy_(stored)
    assert torch.equal(decode("f32", odd), rows())


def test_ids_are_no_numbers_to_convert() -> None:
    with pytest.raises(ConfigError, match="i64"):
        decode("i64", torch.zeros((1, 8), dtype=torch.uint8))

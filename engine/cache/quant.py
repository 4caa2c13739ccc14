"""Quantized rows: q8_0, q5_0 and q4_0 in GGUF's block layouts, and the Hadamard rotation before them.

A block is 32 consecutive values of a row. Bytes of a block:

    q8_0   0..2 scale (f16)                       2..34 32 values (int8)
    q5_0   0..2 scale (f16)   2..6 high bits      6..22 16 bytes: value i low nibble, value i + 16 high
    q4_0   0..2 scale (f16)                       2..18 as above

The rounding is that of the reference quantizers, bit for bit (gguf.quants, tests/engine/cache/test_quant.py).
Scales of q4_0 and q5_0 map the largest magnitude to the end of the range that has one value more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from engine.errors import ConfigError
from engine.shapes import shapes_are_fixed
from engine.state import DTYPES

BLOCK = 32
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


def encode(dtype: str, values: torch.Tensor) -> torch.Tensor:
    """float32 [..., n * 32] to uint8 [..., n * block bytes]."""
    blocks = values.reshape(-1, BLOCK)
    if dtype == "q8_0":
        out = _encode_q8_0(blocks)
    elif dtype == "q5_0":
        out = _encode_q5_0(blocks)
    elif dtype == "q4_0":
        out = _encode_q4_0(blocks)
    else:
        raise ConfigError(f"no quantizer for {dtype!r}")
    return out.view(*values.shape[:-1], values.shape[-1] // BLOCK * out.shape[1])


def decode(dtype: str, stored: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    """uint8 [..., n * block bytes] to `out` [..., n * 32]. The product is formed in float32."""
    if dtype == "q8_0":
        values = _decode_q8_0(stored.reshape(-1, 34))
    elif dtype == "q5_0":
        values = _decode_q5_0(stored.reshape(-1, 22))
    elif dtype == "q4_0":
        values = _decode_q4_0(stored.reshape(-1, 18))
    else:
        raise ConfigError(f"no quantizer for {dtype!r}")
    num_values = stored.shape[-1] // DTYPES[dtype][0] * BLOCK
    return values.to(out).view(*stored.shape[:-1], num_values)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.float16).view(torch.uint8)


def _scale(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, :2].contiguous().view(torch.float16).float()


def _encode_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    # Halves go away from zero, where torch.round would go to even.
    size = scaled.abs()
    whole = size.floor()
    rounded = scaled.sign() * (whole + (2 * (size - whole)).floor())
    return torch.cat((_scale_bytes(scale), rounded.to(torch.int8).view(torch.uint8)), 1)


def _decode_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _scale(blocks)


def _levels(blocks: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, uint8 values 0…2*half-1) with the largest magnitude at -half."""
    extreme = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = extreme / -half
    levels = (blocks * _inverse(scale) + (half + 0.5)).trunc().clamp(0, 2 * half - 1)
    return scale, levels.to(torch.uint8)


def _encode_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, levels = _levels(blocks, 8)
    return torch.cat((_scale_bytes(scale), levels[:, :16] | (levels[:, 16:] << 4)), 1)


def _decode_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).view(torch.int8).sub_(8).float() * _scale(blocks)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low nibbles of uint8 [n, 16], then the high ones, uint8 [n, 32]; taken eight bytes at a time."""
    # A copy in any case: a lone block is contiguous where it lies, but not aligned.
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64)
    return torch.cat((words & _LOW_NIBBLES, words >> 4 & _LOW_NIBBLES), 1).view(torch.uint8)


def _bits(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@cache
def _spread(device: torch.device) -> torch.Tensor:
    """int64 [256]: the bits of each byte, as eight bytes that are 16 or 0."""
    octets = torch.arange(256, dtype=torch.uint8, device=device)
    bits = octets[:, None] >> _bits(device) & 1
    return (bits << 4).contiguous().view(torch.int64).flatten()


def _encode_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, levels = _levels(blocks, 16)
    high = ((levels >> 4).view(-1, 4, 8) << _bits(blocks.device)).sum(2, dtype=torch.uint8)
    low = levels & 15
    return torch.cat((_scale_bytes(scale), high, low[:, :16] | (low[:, 16:] << 4)), 1)


def _decode_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    fifth = _spread(blocks.device)[blocks[:, 2:6].int()].view(torch.uint8)
    levels = _nibbles(blocks[:, 6:]).bitwise_or_(fifth)
    return levels.view(torch.int8).sub_(16).float() * _scale(blocks)


#: Rotations of fewer values spread an outlier too little to be worth their time.
LEAST_ROTATED = 64


def hadamard_block(sizes: Sequence[int]) -> int:
    """The largest power of two that divides all of `sizes`."""
    common = math.gcd(*sizes)
    return common & -common


class Hadamard:
    """An orthonormal, symmetric rotation of every `block` values of a head: its own inverse.

    It spreads outliers over the block, which a quantizer's shared scale would otherwise pay for. Scores
    are unchanged when queries and keys are both rotated.
    """

    def __init__(self, block: int, device: torch.device) -> None:
        matrix = torch.ones((1, 1), dtype=torch.float64)
        while matrix.shape[0] < block:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        self.block = block
        self._matrix = (matrix / block**0.5).to(torch.float32).to(device)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, ..., head size] rotated, over the whole head; computed in float32, returned in x's
        dtype. Where shapes are fixed, token by token."""
        if shapes_are_fixed():
            return torch.cat([self._rotated(token.clone()) for token in torch.split(x, 1)])
        return self._rotated(x)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.reshape(-1, self.block).float()
        return torch.mm(blocks, self._matrix).to(x.dtype).view(x.shape)

"""The Hadamard rotation that quantized rows may be stored in (docs/caches.md)."""

from __future__ import annotations

import math
from functools import cache

import torch


def rotate(values: torch.Tensor, block: int) -> torch.Tensor:
    """float32 values, every `block` of the last axis rotated together, as the engine does; 0: as they are. It
    is its own inverse."""
    if not block or not values.numel():
        return values
    return torch.mm(values.reshape(-1, block), _hadamard(block)).view(values.shape)


@cache
def _hadamard(block: int) -> torch.Tensor:
    """Sylvester's, float32 [block, block], orthonormal: its own inverse."""
    matrix = torch.ones((1, 1), dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / math.sqrt(block)).float()

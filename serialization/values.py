"""What stored rows say, as float32, and floats as rows say them: bytes in the dtypes of `engine.state`."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from engine.errors import ConfigError

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BLOCKS = {
    "q8_0": GGMLQuantizationType.Q8_0,
    "q5_0": GGMLQuantizationType.Q5_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}


def is_quantized(dtype: str) -> bool:
    """Whether several values share a scale."""
    return dtype in _BLOCKS


def decode(dtype: str, stored: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, row bytes] to float32 [rows, values], exactly. Raises ConfigError for a dtype of no
    floats."""
    stored = stored.cpu().contiguous()
    if dtype in _PLAIN:
        if stored.storage_offset() % _PLAIN[dtype].itemsize:
            stored = stored.clone()
        return stored.view(_PLAIN[dtype]).float()
    values = quants.dequantize(stored.numpy(), _block(dtype))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def encode(dtype: str, values: torch.Tensor) -> torch.Tensor:
    """float32 [rows, values] to uint8 [rows, row bytes], each value as near as the dtype has one: to the bit
    what the engine stores. Beyond the largest of f16 it is infinite, as there."""
    values = values.cpu().contiguous()
    if dtype in _PLAIN:
        return values.to(_PLAIN[dtype]).view(torch.uint8)
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.quantize(values.numpy(), _block(dtype)))


def _block(dtype: str) -> GGMLQuantizationType:
    if dtype not in _BLOCKS:
        raise ConfigError(f"rows of {dtype} hold no numbers that could be converted")
    return _BLOCKS[dtype]

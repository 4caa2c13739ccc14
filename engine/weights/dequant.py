"""Stored GGUF rows to torch tensors, a slice of rows at a time so that the work stays in the CPU's cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import WeightsRefused
from engine.weights.gguf import TensorInfo

#: Values decoded at once: float32 scratch of 1 MiB, which a core's second-level cache holds.
_SLICE = 262_144


def dequantized(rows: npt.NDArray[np.uint8], info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    """`rows` (uint8 [rows, bytes of a row]) as a tensor of `info.shape` in `dtype`.

    Values are float32 as the `gguf` package decodes them, then rounded once to `dtype`.
    Raises WeightsRefused for a type that the package cannot decode.
    """
    width = info.shape[-1]
    out = torch.empty((rows.shape[0], width), dtype=dtype)
    step = max(1, _SLICE // width)
    for start in range(0, rows.shape[0], step):
        part = _decoded(rows[start : start + step], info)
        out[start : start + step].copy_(torch.from_numpy(part.reshape(-1, width)))
    return out.reshape(info.shape)


def _decoded(rows: npt.NDArray[np.uint8], info: TensorInfo) -> npt.NDArray[np.float32]:
    plain = _PLAIN.get(info.quant)
    if plain is not None:
        return np.ascontiguousarray(rows).view(plain).astype(np.float32)
    try:
        # Scales of 0 make "0 * inf" in unused codes of some types; the result is what the format says.
        with np.errstate(all="ignore"):
            return np.asarray(dequantize(rows, info.quant), dtype=np.float32)
    except NotImplementedError:
        raise WeightsRefused(f"tensor {info.name}: {info.quant.name} cannot be dequantized") from None


_PLAIN: dict[GGMLQuantizationType, str] = {
    GGMLQuantizationType.F32: "<f4",
    GGMLQuantizationType.F16: "<f2",
    GGMLQuantizationType.F64: "<f8",
}

assert all(GGML_QUANT_SIZES[kind][0] == 1 for kind in _PLAIN)

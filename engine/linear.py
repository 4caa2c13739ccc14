"""Matrix products, as fast as the device has them.

On a CPU with oneDNN the weight is packed once into the layout of its kernels: one row times a matrix is
then twice as fast as torch's own product, and a few rows do not fall into its slow paths.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

PACKABLE = (torch.bfloat16, torch.float32)


class Linear:
    """`x` [tokens, in] to `x @ weight.T + bias` [tokens, out], in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        packable = weight.device.type == "cpu" and weight.dtype in PACKABLE and weight.numel() > 0
        self._packed = packable and can_pack()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self._packed else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return cast(torch.Tensor, product)
        return F.linear(x, self._weight, self._bias)


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    return bool(torch._C._has_mkldnn)

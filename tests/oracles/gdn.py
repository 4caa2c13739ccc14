"""Delta nets that remember: the library draws decays so strong that a state is gone after a token or two."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def remembering(cls: type) -> type:
    """`cls` with decays from hardly any to strong ones among the heads of each layer."""

    class Remembering(cls):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    if name.endswith("A_log"):
                        parameter.copy_(torch.linspace(-6, 1, parameter.numel()).view(parameter.shape))

    return Remembering

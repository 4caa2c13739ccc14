"""Delta nets that remember: the library draws decays so strong that a state is gone after a token or two."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def remembering(cls: type) -> type:
    """`cls` with decays from hardly any to strong ones among the heads of each layer."""

    class Remembering(cls):  # type: ignore[misc]
        def _init_weights(self, module: torch.nn.Module) -> Any:
            super()._init_weights(module)
            for name, parameter in module.named_parameters(recurse=False):
                if name == "A_log":
                    with torch.no_grad():
                        parameter.copy_(torch.linspace(-6, 1, parameter.numel()).view(parameter.shape))

    return Remembering

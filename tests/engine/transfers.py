"""How many bytes cross between the host and a device, counted where torch dispatches what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Transfers(TorchDispatchMode):
    """While it is entered: bytes of the results that operations on other devices leave on the host
    (`to_host`), and the reverse (`to_device`). A value that python reads (`item`) counts as one too."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host = 0
        self.to_device = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.to_host += sum(tensor.nbytes for tensor in given if not _on_host(tensor))
        for made in _tensors(result):
            if _on_host(made):
                self.to_host += made.nbytes if any(not _on_host(tensor) for tensor in given) else 0
            else:
                self.to_device += made.nbytes if any(_has_values(tensor) for tensor in given) else 0
        return result


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _has_values(tensor: torch.Tensor) -> bool:
    """A tensor of one value on the host may join any operation on a device, as a constant of it."""
    return _on_host(tensor) and tensor.dim() > 0


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

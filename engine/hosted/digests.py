"""What a hosted model is: digests of its weights and its configuration, and what decides its last bits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import torch
from blake3 import blake3

from engine.errors import WeightsRefused
from engine.hosted.model import CausalModel
from engine.state import Value

#: Bytes of weights that are on the host at once.
_PIECE = 2**26

#: Keys of a configuration that say where it came from, or how it is computed with, but not what it means.
_ASIDE = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_experts_implementation",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "dtype",
        "experts_implementation",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

#: Packages that models of transformers compute with where they are installed.
_KERNELS = ("causal-conv1d", "flash-attn", "flash-linear-attention", "kernels", "mamba-ssm")


def digest_of_weights(model: CausalModel) -> str:
    """`b3-<64 hex>` over the names, dtypes, shapes and bytes of the state dict. Tensors are gone through one
    after the other, in pieces of 64 MiB. Raises WeightsRefused for weights that are not in memory."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            hasher.update(f"\n{name}={tensor!r}".encode())
            continue
        if tensor.is_meta:
            raise WeightsRefused(
                f"{name} is not in memory (it was offloaded): say what the weights are by `weights`"
            )
        hasher.update(f"\n{name}:{tensor.dtype}:{list(tensor.shape)}:".encode())
        for piece in _pieces(tensor):
            hasher.update(piece.numpy().data)
    return "b3-" + hasher.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its bytes, uint8 [n], in order."""
    values = tensor.detach().reshape(-1)
    at_once = max(1, _PIECE // max(1, tensor.element_size()))
    for at in range(0, len(values), at_once):
        yield values[at : at + at_once].contiguous().view(torch.uint8).cpu()


def digest_of_config(model: CausalModel) -> str:
    """`b3-<64 hex>` over what the configuration says otherwise than its class does by default: a later
    release of transformers may have more settings."""
    tree = _without_aside(model.config.to_diff_dict())
    data = json.dumps(tree, sort_keys=True, default=str)
    return "b3-" + blake3(data.encode()).hexdigest()


def _without_aside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_aside(item) for key, item in value.items() if key not in _ASIDE}
    if isinstance(value, list | tuple):
        return [_without_aside(item) for item in value]
    return value


def making_of(model: CausalModel) -> Mapping[str, Value]:
    """Releases, and which of several ways attention and experts are computed."""
    ways = {
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
    }
    packages = {name: _version(name) for name in ("transformers", *_KERNELS)}
    found = {**packages, **{name: None if way is None else str(way) for name, way in ways.items()}}
    return {name: value for name, value in found.items() if value is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""From a file's tensors to building blocks: every shape checked, matrices that read one input joined."""

from __future__ import annotations

import torch

from engine.errors import WeightsRefused
from engine.linear import Linear
from engine.models.base import Hparams, Placement, WeightSource
from engine.models.layers import Activation, Attention, FeedForward, HeadNorm, RmsNorm


class Loader:
    """Tensors of one model, in its dtype and place. Each raises WeightsRefused when a tensor is missing
    or of another shape."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        self._weights = weights
        self._placement = placement

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """In the model's dtype."""
        return self._checked(name, self._placement.dtype, shape)

    def exact(self, name: str, *shape: int) -> torch.Tensor:
        """In float32, for norms."""
        return self._checked(name, torch.float32, shape)

    def linear(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Linear:
        """One matrix out of several that read the same input: `names` without ".weight"."""
        weights = [self.tensor(f"{name}.weight", n, columns) for name, n in zip(names, rows, strict=True)]
        bias = None
        if any(self.has(f"{name}.bias") for name in names):
            bias = torch.cat([self.tensor(f"{name}.bias", n) for name, n in zip(names, rows, strict=True)])
        return Linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def norm(self, name: str, width: int, eps: float) -> RmsNorm:
        return RmsNorm(self.exact(f"{name}.weight", width), eps)

    def _checked(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if not self._weights.has(name):
            raise WeightsRefused(f"the model lacks the tensor {name}")
        tensor = self._weights.tensor(name, dtype)
        if tuple(tensor.shape) != shape:
            raise WeightsRefused(f"tensor {name} is {list(tensor.shape)}, not {list(shape)}")
        return tensor.to(self._placement.device)


def halves_of_pairs(rows: torch.Tensor, head_size: int, n_rot: int, start: int = 0) -> torch.Tensor:
    """Rows [heads * head_size, ...] of q or k (a matrix, a bias, a norm's weight) whose RoPE turns value
    2i of a head with value 2i + 1, in the order of halves: i with i + n_rot/2. Only the `n_rot` values of
    each head from `start` on move. Where q and k are both re-ordered, scores are the same."""
    heads = rows.unflatten(0, (-1, head_size))
    turned = heads[:, start : start + n_rot]
    halves = torch.cat((turned[:, 0::2], turned[:, 1::2]), 1)
    return torch.cat((heads[:, :start], halves, heads[:, start + n_rot :]), 1).flatten(0, 1)


def load_attention(load: Loader, hp: Hparams, layer: int) -> Attention:
    prefix = f"blk.{layer}"
    q_rows, k_rows = hp.num_heads * hp.head_size, hp.num_kv_heads * hp.head_size
    names = (f"{prefix}.attn_q", f"{prefix}.attn_k", f"{prefix}.attn_v")
    return Attention(
        layer=layer,
        qkv=load.linear(names, (q_rows, k_rows, hp.num_kv_heads * hp.head_size_v), hp.width),
        out=load.linear((f"{prefix}.attn_output",), (hp.width,), hp.num_heads * hp.head_size_v),
        num_heads=hp.num_heads,
        num_kv_heads=hp.num_kv_heads,
        head_size=hp.head_size,
        head_size_v=hp.head_size_v,
        scale=hp.scale,
        norm=_load_head_norm(load, hp, prefix),
    )


def load_ffn(load: Loader, hp: Hparams, layer: int, activation: Activation) -> FeedForward:
    prefix = f"blk.{layer}"
    both = (f"{prefix}.ffn_gate", f"{prefix}.ffn_up")
    return FeedForward(
        gate_up=load.linear(both, (hp.ffn_width, hp.ffn_width), hp.width),
        down=load.linear((f"{prefix}.ffn_down",), (hp.width,), hp.ffn_width),
        activation=activation,
    )


def load_head(load: Loader, hp: Hparams, embedding: torch.Tensor) -> Linear:
    """The output matrix: the file's own, or the embedding table again."""
    if load.has("output.weight"):
        return load.linear(("output",), (hp.vocab_size,), hp.width)
    return Linear(embedding)


def _load_head_norm(load: Loader, hp: Hparams, prefix: str) -> HeadNorm | None:
    if not load.has(f"{prefix}.attn_q_norm.weight"):
        return None
    q = load.exact(f"{prefix}.attn_q_norm.weight", hp.head_size).expand(hp.num_heads, -1)
    k = load.exact(f"{prefix}.attn_k_norm.weight", hp.head_size).expand(hp.num_kv_heads, -1)
    return HeadNorm(torch.cat((q, k)), hp.rms_eps)

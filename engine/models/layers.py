"""The building blocks that decoder layers share. Matrices that read the same input are one matrix.

The residual stream is float32 whatever the model computes in: it is more exact, and torch's norm of
bf16 rows is 17 times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import View
from engine.rope import Angles, turn

Activation = Callable[[torch.Tensor], torch.Tensor]
#: a matrix, or several that add up
Projection = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / rms(x) * weight over the last axis, float32 in and out."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last axis, float32 in and out."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RmsNorm over each head. `weight` is [heads + kv heads, head size]: q's repeated, then k's."""

    weight: torch.Tensor
    eps: float

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(qk, qk.shape[-1:], None, self.eps) * self.weight


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of one layer; what is remembered lies behind the view. `softcap` and `sinks`
    are those of `View.attend`; values count `value_scale` times. `norm` takes float32 [tokens, heads + kv
    heads, head size]: those of q, then those of k."""

    layer: int
    qkv: Projection
    out: Projection
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    norm: Callable[[torch.Tensor], torch.Tensor] | None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    value_scale: float = 1.0

    def __call__(self, x: torch.Tensor, angles: Angles | None, view: View) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back. No angles: no positions."""
        num_tokens, num_qk = x.shape[0], self.num_heads + self.num_kv_heads
        v_rows = self.num_kv_heads * self.head_size_v
        flat_qk, flat_v = torch.split(self.qkv(x), [num_qk * self.head_size, v_rows], dim=-1)
        qk = flat_qk.view(num_tokens, num_qk, self.head_size).float()
        if self.norm is not None:
            qk = self.norm(qk)
        if angles is not None:
            qk = turn(qk, angles)
        q, k = torch.split(qk.to(x.dtype), [self.num_heads, self.num_kv_heads], dim=1)
        v = flat_v.view(num_tokens, self.num_kv_heads, self.head_size_v)
        attended = view.attend(self.layer, q, k, v, self.scale, self.softcap, sinks=self.sinks)
        if self.value_scale != 1.0:
            attended = attended * self.value_scale
        return self.out(attended.reshape(num_tokens, -1))


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate x) * up x)."""

    gate_up: Projection
    down: Projection
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)

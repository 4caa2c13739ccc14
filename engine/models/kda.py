"""Kimi Delta Attention (Kimi Linear technical report, 2025): a gated delta net in which every channel of a
head's keys forgets at a pace of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import PointSpec, View
from engine.linear import Linear
from engine.models.conv import ShortConv
from engine.models.layers import RmsNorm
from engine.models.loading import Loader
from engine.models.scan.delta import gated_delta_rule, unit
from engine.models.scan.pieces import starts_of

CONV, STATE = "kda.conv", "kda.state"

#: what the input says of forgetting, float32 [.., heads, head size], to logarithms of decays
Forgetting = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class KdaSizes:
    """Heads, the values of one (of its query, key and value each), and tokens that a convolution mixes."""

    num_heads: int
    head_size: int
    kernel: int

    @property
    def width(self) -> int:
        return self.num_heads * self.head_size

    def parts(self, layer: int) -> tuple[PointSpec, PointSpec]:
        """What a layer remembers: the last inputs of the convolutions over q, k and v, and the state."""
        return (
            PointSpec(CONV, layer, (self.kernel - 1, 3 * self.width)),
            PointSpec(STATE, layer, (self.num_heads, self.head_size, self.head_size)),
        )


@dataclass(frozen=True, slots=True)
class Unbounded:
    """-speed * softplus(f + dt): a channel may forget all at once. `speed`, exp(A_log), is float32
    [heads, 1], `dt` [heads, head size]."""

    speed: torch.Tensor
    dt: torch.Tensor

    def __call__(self, f: torch.Tensor) -> torch.Tensor:
        return -self.speed * F.softplus(f + self.dt)


@dataclass(frozen=True, slots=True)
class Bounded:
    """bound * sigmoid(speed * (f + dt)): no token makes a channel forget more than `bound`, which is below 0
    (Kimi K3)."""

    speed: torch.Tensor
    dt: torch.Tensor
    bound: float

    def __call__(self, f: torch.Tensor) -> torch.Tensor:
        return self.bound * torch.sigmoid(self.speed * (f + self.dt))


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """`inputs` has rows for q, k and v (`KdaSizes.width` each), for what `forget_up` and `gate_up` make the
    forgetting and the output's gate of (head size each), and for the writing strength [heads], in this order.
    """

    layer: int
    sizes: KdaSizes
    inputs: Linear
    conv: ShortConv
    forget_up: Linear
    forgetting: Forgetting
    gate_up: Linear
    norm: RmsNorm
    out: Linear

    def __call__(self, x: torch.Tensor, view: View) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        width, size = self.sizes.width, self.sizes.head_size
        qkv, f, gate, b = torch.split(self.inputs(x), [3 * width, size, size, self.sizes.num_heads], dim=-1)
        segments = len(view.segments)
        rows = qkv.float().view(segments, -1, 3 * width)
        mixed, tails = self.conv(rows, view.point(CONV, self.layer), view.newest)
        view.set_point(CONV, self.layer, tails)
        shape = (*mixed.shape[:2], self.sizes.num_heads, size)
        q, k, v = (channels.view(shape) for channels in F.silu(mixed).chunk(3, dim=-1))
        out, states = gated_delta_rule(
            starts_of(view),
            view.point(STATE, self.layer),
            unit(q) * size**-0.5,
            unit(k),
            v,
            self.forgetting(self.forget_up(f).float().view(shape)),
            torch.sigmoid(b.float()).view(shape[:3]),
            view.newest,
        )
        view.set_point(STATE, self.layer, states)
        gated = self.norm(out) * torch.sigmoid(self.gate_up(gate).float()).view(shape)
        return self.out(gated.reshape(x.shape[0], -1).to(x.dtype))


def load_forgetting(
    load: Loader, prefix: str, sizes: KdaSizes, log_speed: torch.Tensor, bound: float | None
) -> Forgetting:
    """`log_speed` is A_log, float32 [heads]; with a `bound` it is the bounded law."""
    speed = log_speed.exp()[:, None]
    dt = load.exact(f"{prefix}.dt_bias", sizes.width).view(sizes.num_heads, sizes.head_size)
    return Unbounded(speed, dt) if bound is None else Bounded(speed, dt, bound)


def load_delta_attention(
    load: Loader,
    prefix: str,
    layer: int,
    width: int,
    sizes: KdaSizes,
    conv: ShortConv,
    forgetting: Forgetting,
    eps: float,
) -> DeltaAttention:
    """The matrices of `prefix` under the hub's names."""
    names = tuple(f"{prefix}.{name}_proj" for name in ("q", "k", "v", "f_a", "g_a", "b"))
    rows = (*(sizes.width,) * 3, sizes.head_size, sizes.head_size, sizes.num_heads)
    return DeltaAttention(
        layer=layer,
        sizes=sizes,
        inputs=load.linear(names, rows, width),
        conv=conv,
        forget_up=load.linear((f"{prefix}.f_b_proj",), (sizes.width,), sizes.head_size),
        forgetting=forgetting,
        gate_up=load.linear((f"{prefix}.g_b_proj",), (sizes.width,), sizes.head_size),
        norm=load.norm(f"{prefix}.o_norm", sizes.head_size, eps),
        out=load.linear((f"{prefix}.o_proj",), (width,), sizes.width),
    )

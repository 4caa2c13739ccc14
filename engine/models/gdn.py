"""Gated DeltaNet (Yang, Kautz & Hatamizadeh 2024): a layer that keeps a matrix a head, and no rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import PointSpec, View
from engine.linear import Linear
from engine.models.conv import ShortConv
from engine.models.fields import Fields
from engine.models.layers import Activation, RmsNorm
from engine.models.scan.delta import gated_delta_rule, unit
from engine.models.scan.pieces import starts_of

CONV, STATE = "gdn.conv", "gdn.state"

_MOST = 2**16


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads, and the values of one. Neighbouring heads of values share one of queries and keys."""

    num_k_heads: int
    num_v_heads: int
    k_size: int
    v_size: int
    kernel: int

    @property
    def k_width(self) -> int:
        return self.num_k_heads * self.k_size

    @property
    def v_width(self) -> int:
        return self.num_v_heads * self.v_size

    @property
    def channels(self) -> int:
        """Values of q, k and v of all heads, in this order: what the convolution runs over."""
        return 2 * self.k_width + self.v_width

    def parts(self, layer: int) -> tuple[PointSpec, PointSpec]:
        """What a layer remembers: the convolution's last inputs, and the state."""
        return (
            PointSpec(CONV, layer, (self.kernel - 1, self.channels)),
            PointSpec(STATE, layer, (self.num_v_heads, self.k_size, self.v_size)),
        )


def read_delta_sizes(fields: Fields) -> DeltaSizes:
    """Raises WeightsRefused where a number is missing or they do not fit together."""
    num_k_heads = fields.count("linear_num_key_heads", most=_MOST)
    num_v_heads = fields.count("linear_num_value_heads", most=_MOST)
    if num_v_heads % num_k_heads:
        raise fields.refused("linear_num_value_heads", num_v_heads)
    return DeltaSizes(
        num_k_heads,
        num_v_heads,
        fields.count("linear_key_head_dim", most=_MOST),
        fields.count("linear_value_head_dim", most=_MOST),
        fields.count("linear_conv_kernel_dim", least=2, most=_MOST),
    )


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """`inputs` has rows for q, k, v (`DeltaSizes.channels`), z, b and a, in this order. What is forgotten,
    `rate` * softplus(a + `dt_bias`), and written, `most_written` * sigmoid(b), is float32 per head of values;
    `rate` is below 0, and with 2 as `most_written` a state may turn about.
    """

    layer: int
    sizes: DeltaSizes
    inputs: Linear
    conv: ShortConv
    rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: RmsNorm
    gate: Activation
    out: Linear
    most_written: float = 1.0

    def __call__(self, x: torch.Tensor, view: View) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        sizes = self.sizes
        rows = self.inputs(x).float().view(len(view.segments), -1, self.inputs.out_features)
        heads = sizes.num_v_heads
        qkv, z, b, a = torch.split(rows, [sizes.channels, sizes.v_width, heads, heads], dim=-1)
        mixed, tails = self.conv(qkv, view.point(CONV, self.layer), view.newest)
        view.set_point(CONV, self.layer, tails)
        q, k, v = torch.split(F.silu(mixed), [sizes.k_width, sizes.k_width, sizes.v_width], dim=-1)
        out, states = gated_delta_rule(
            starts_of(view),
            view.point(STATE, self.layer),
            self._shared(q) * sizes.k_size**-0.5,
            self._shared(k),
            v.view(*v.shape[:2], heads, sizes.v_size),
            self.rate * F.softplus(a + self.dt_bias),
            torch.sigmoid(b) * self.most_written,
            view.newest,
        )
        view.set_point(STATE, self.layer, states)
        gated = self.norm(out) * self.gate(z.view(out.shape))
        return self.out(gated.reshape(x.shape[0], -1).to(x.dtype))

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """Unit vectors of every key head, one for each head of values."""
        heads = unit(x.view(*x.shape[:2], self.sizes.num_k_heads, self.sizes.k_size))
        return heads.repeat_interleave(self.sizes.num_v_heads // self.sizes.num_k_heads, dim=2)

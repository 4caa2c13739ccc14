"""The mixer of Mamba-2 layers (Dao & Gu 2024, "Transformers are SSMs", section 7): one projection to a gate,
values with their keys and queries, and step sizes; a short convolution, the recurrence, a norm, a projection.

Memory of a layer: the inputs that the convolution still needs, and the state of every head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import PartNeed, PointSpec, View
from engine.linear import Linear
from engine.models.conv import ShortConv, load_conv
from engine.models.decoder import Pass
from engine.models.fields import Fields
from engine.models.loading import Loader, check_bias
from engine.models.scan.pieces import in_pieces, starts_of
from engine.models.scan.ssd import ssd

#: Names of the two parts of a layer.
CONV, STATE = "ssm.conv", "ssm.state"

#: (y, gate), both float32 [..., heads * head size], to what is projected back
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ssm2Sizes:
    """Heads of `head_size` values share keys and queries in groups; `limits` are those of a step's size."""

    num_heads: int
    head_size: int
    num_groups: int
    d_state: int
    kernel: int
    limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """What the convolution mixes: values, keys and queries."""
        return self.inner + 2 * self.num_groups * self.d_state

    def parts(self, layer: int) -> tuple[PartNeed, ...]:
        """What a layer remembers."""
        return (
            PointSpec(CONV, layer, (self.kernel - 1, self.channels)),
            PointSpec(STATE, layer, (self.num_heads, self.head_size, self.d_state)),
        )


@dataclass(frozen=True, slots=True)
class Ssm2Names:
    """What a family's configuration calls the sizes."""

    num_heads: str
    head_size: str
    num_groups: str
    d_state: str
    kernel: str


#: As most hybrids have them.
HYBRID = Ssm2Names("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def read_ssm2_sizes(fields: Fields, inner: int, names: Ssm2Names = HYBRID) -> Ssm2Sizes:
    """`inner` is how many values all heads have together. Raises WeightsRefused where sizes do not fit."""
    num_heads = fields.count(names.num_heads)
    if inner % num_heads:
        raise fields.refused(names.num_heads, num_heads)
    sizes = Ssm2Sizes(
        num_heads=num_heads,
        head_size=fields.count_or_auto(names.head_size, inner // num_heads),
        num_groups=fields.count(names.num_groups),
        d_state=fields.count(names.d_state),
        kernel=fields.count(names.kernel, 4, least=2),
        limits=fields.limits("time_step_limit"),
    )
    if sizes.inner != inner:
        raise fields.refused(names.head_size, sizes.head_size)
    if num_heads % sizes.num_groups:
        raise fields.refused(names.num_groups, sizes.num_groups)
    return sizes


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """rms norm(y * SiLU(gate)) * weight, each of `groups` equal parts of a row by itself."""

    weight: torch.Tensor
    eps: float
    groups: int = 1

    def __call__(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return grouped_norm(y * F.silu(gate), self.weight, self.eps, self.groups)


@dataclass(frozen=True, slots=True)
class NormThenGate:
    """rms norm(y) * weight * SiLU(gate), each of `groups` equal parts of a row by itself."""

    weight: torch.Tensor
    eps: float
    groups: int = 1

    def __call__(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return grouped_norm(y, self.weight, self.eps, self.groups) * F.silu(gate)


def gate_only(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return y * F.silu(gate)


def grouped_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    parts = x.view(*x.shape[:-1], groups, -1)
    return F.rms_norm(parts, parts.shape[-1:], None, eps).view(x.shape) * weight


@dataclass(frozen=True, slots=True)
class Ssm2Mixer:
    """One layer's. `rate` float32 [heads] is negative; `scales` multiply what `into` projects."""

    layer: int
    sizes: Ssm2Sizes
    into: Linear
    scales: torch.Tensor | None
    conv: ShortConv
    dt_bias: torch.Tensor
    rate: torch.Tensor
    skip: torch.Tensor
    gate: Gate
    out: Linear

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        sizes, view = self.sizes, step.view
        projected = self.into(x).float()
        if self.scales is not None:
            projected = projected * self.scales
        side_by_side = projected.view(len(view.segments), -1, projected.shape[-1])
        widths = [sizes.inner, sizes.channels, sizes.num_heads]
        gate, mixed, dt = torch.split(side_by_side, widths, -1)
        mixed, inputs = self.conv(mixed, view.point(CONV, self.layer), view.newest)
        view.set_point(CONV, self.layer, inputs)
        y = self._scan(F.silu(mixed), F.softplus(dt + self.dt_bias).clamp(*sizes.limits), view)
        return self.out(self.gate(y, gate).flatten(0, 1).to(x.dtype))

    def _scan(self, mixed: torch.Tensor, dt: torch.Tensor, view: View) -> torch.Tensor:
        """`mixed` [segments, tokens, channels] and step sizes [segments, tokens, heads] to [segments, tokens,
        values of all heads]."""
        sizes = self.sizes
        shared = sizes.num_groups * sizes.d_state
        values, b, c = torch.split(mixed, [sizes.inner, shared, shared], -1)
        x = values.view(*dt.shape, sizes.head_size)
        grouped = *dt.shape[:2], sizes.num_groups, sizes.d_state
        inputs = (x * dt[..., None], dt * self.rate, b.view(grouped), c.view(grouped))
        before = view.point(STATE, self.layer)
        y, states = in_pieces(ssd, before, inputs, starts_of(view), view.newest)
        view.set_point(STATE, self.layer, states)
        return (y + x * self.skip[:, None]).flatten(-2)


def load_ssm2(
    load: Loader,
    prefix: str,
    layer: int,
    width: int,
    sizes: Ssm2Sizes,
    gate: Gate,
    scales: torch.Tensor | None = None,
) -> Ssm2Mixer:
    """`scales` may be anywhere. Raises WeightsRefused where a tensor is missing or misshapen."""
    projected = sizes.inner + sizes.channels + sizes.num_heads
    dt_bias = load.exact(f"{prefix}.dt_bias", sizes.num_heads)
    return Ssm2Mixer(
        layer=layer,
        sizes=sizes,
        into=load.linear((f"{prefix}.in_proj",), (projected,), width),
        scales=None if scales is None else scales.to(dt_bias.device),
        conv=load_conv(load, f"{prefix}.conv1d", sizes.channels, sizes.kernel),
        dt_bias=dt_bias,
        rate=-load.exact(f"{prefix}.A_log", sizes.num_heads).exp(),
        skip=load.exact(f"{prefix}.D", sizes.num_heads),
        gate=gate,
        out=load.linear((f"{prefix}.out_proj",), (width,), sizes.inner),
    )


def load_gated_ssm2(
    load: Loader, fields: Fields, prefix: str, layer: int, width: int, sizes: Ssm2Sizes, eps: float
) -> Ssm2Mixer:
    """As most hybrids have it: the gate before the norm, which every group has for itself, and the flags of
    biases under the names that go with HYBRID."""
    check_bias(load, fields, f"{prefix}.in_proj", False, "mamba_proj_bias")
    check_bias(load, fields, f"{prefix}.conv1d", True, "mamba_conv_bias")
    gate = GatedNorm(load.exact(f"{prefix}.norm.weight", sizes.inner), eps, sizes.num_groups)
    return load_ssm2(load, prefix, layer, width, sizes, gate)

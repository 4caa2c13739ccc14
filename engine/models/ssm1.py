"""The mixer of Mamba-1 layers (Gu & Dao 2023, "Mamba", sections 3.4 and 3.6): values and a gate, a short
convolution, step sizes and the state's input and output made of its result, the recurrence, a projection.

Memory of a layer: the inputs that the convolution still needs, and the state of every channel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import PartNeed, PointSpec, View
from engine.linear import Linear
from engine.models.conv import ShortConv, load_conv
from engine.models.decoder import Pass
from engine.models.layers import RmsNorm
from engine.models.loading import Loader
from engine.models.scan.pieces import in_pieces, starts_of
from engine.models.scan.selective import selective
from engine.models.ssm2 import CONV, STATE


@dataclass(frozen=True, slots=True)
class Ssm1Sizes:
    """`rank` is that of the projection to step sizes."""

    channels: int
    d_state: int
    rank: int
    kernel: int

    @property
    def shared(self) -> tuple[int, int, int]:
        """What is made of a token for all channels: step sizes yet to be projected, input, output."""
        return self.rank, self.d_state, self.d_state

    def parts(self, layer: int) -> tuple[PartNeed, ...]:
        """What a layer remembers."""
        return (
            PointSpec(CONV, layer, (self.kernel - 1, self.channels)),
            PointSpec(STATE, layer, (self.channels, self.d_state)),
        )


#: Of step sizes, of the state's input and of its output.
Norms = tuple[RmsNorm, RmsNorm, RmsNorm]


@dataclass(frozen=True, slots=True)
class Ssm1Mixer:
    """One layer's. `rate` float32 [channels, d_state] is negative."""

    layer: int
    sizes: Ssm1Sizes
    into: Linear
    conv: ShortConv
    select: Linear
    norms: Norms | None
    dt: Linear
    dt_bias: torch.Tensor
    rate: torch.Tensor
    skip: torch.Tensor
    out: Linear

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        view = step.view
        projected = self.into(x).float()
        mixed, gate = projected.view(len(view.segments), -1, 2 * self.sizes.channels).chunk(2, -1)
        mixed, inputs = self.conv(mixed, view.point(CONV, self.layer), view.newest)
        view.set_point(CONV, self.layer, inputs)
        y = self._scan(F.silu(mixed), view, step.dtype) * F.silu(gate)
        return self.out(y.flatten(0, 1).to(step.dtype))

    def _scan(self, x: torch.Tensor, view: View, dtype: torch.dtype) -> torch.Tensor:
        """float32 [segments, tokens, channels] to the same."""
        shared = self.select(x.flatten(0, 1).to(dtype)).float()
        dt, b, c = torch.split(shared, list(self.sizes.shared), -1)
        if self.norms is not None:
            dt, b, c = (norm(part) for norm, part in zip(self.norms, (dt, b, c), strict=True))
        size = F.softplus(self.dt(dt.to(dtype)).float() + self.dt_bias).view(x.shape)
        b, c = (part.reshape(*x.shape[:2], self.sizes.d_state) for part in (b, c))
        law = functools.partial(selective, self.rate)
        before = view.point(STATE, self.layer)
        y, states = in_pieces(law, before, (x, size, b, c), starts_of(view), view.newest)
        view.set_point(STATE, self.layer, states)
        return y + x * self.skip


def load_ssm1(
    load: Loader, prefix: str, layer: int, width: int, sizes: Ssm1Sizes, norms: Norms | None
) -> Ssm1Mixer:
    """Raises WeightsRefused where a tensor is missing or misshapen."""
    channels = sizes.channels
    return Ssm1Mixer(
        layer=layer,
        sizes=sizes,
        into=load.linear((f"{prefix}.in_proj",), (2 * channels,), width),
        conv=load_conv(load, f"{prefix}.conv1d", channels, sizes.kernel),
        select=load.linear((f"{prefix}.x_proj",), (sum(sizes.shared),), channels),
        norms=norms,
        dt=Linear(load.tensor(f"{prefix}.dt_proj.weight", channels, sizes.rank)),
        dt_bias=load.exact(f"{prefix}.dt_proj.bias", channels),
        rate=-load.exact(f"{prefix}.A_log", channels, sizes.d_state).exp(),
        skip=load.exact(f"{prefix}.D", channels),
        out=load.linear((f"{prefix}.out_proj",), (width,), channels),
    )

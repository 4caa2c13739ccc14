"""Hyper-connections (Zhu et al. 2024) with low-rank gates: several residual streams, from which the input of
a block is mixed and into which its output is injected. Nothing is remembered from token to token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.linear import Linear
from engine.models.loading import Loader


@dataclass(frozen=True, slots=True)
class StreamNorm:
    """x / rms(x) * weight over each stream, float32 [tokens, streams, width]; `weight` [streams, width]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


@dataclass(frozen=True, slots=True)
class StreamMixer:
    """One input out of all streams: their mean, each value of each stream with a gate of its own. `down` and
    `up` work in `dtype`."""

    norm: StreamNorm
    down: Linear
    up: Linear
    dtype: torch.dtype

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, streams, width] to [tokens, width]."""
        return self.mix(self.norm(streams))

    def mix(self, normed: torch.Tensor) -> torch.Tensor:
        """As `__call__`, of streams that are normalised already."""
        hidden = F.silu(self.down(normed.flatten(1).to(self.dtype)) / normed.shape[1])
        gates = self.up(hidden).float().sigmoid().view(normed.shape)
        return (gates * normed).mean(1)


@dataclass(frozen=True, slots=True)
class Connection:
    """A block between streams: its output is added to each, times a factor that the streams decide."""

    mixer: StreamMixer
    inject: Linear

    def __call__(self, streams: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`streams` float32 [tokens, streams, width], the same shape comes back; `block` maps [tokens, width]
        in the model's dtype to its output."""
        normed = self.mixer.norm(streams)
        dtype = self.mixer.dtype
        factors = 2 * (self.inject(normed.flatten(1).to(dtype)).float() / normed.shape[1]).sigmoid()
        out = block(self.mixer.mix(normed).to(dtype)).float()
        return streams + factors[:, :, None] * out[:, None]


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """Residual streams of `width` values, gates between them of `rank`, and what norms add to a square."""

    num_streams: int
    width: int
    rank: int
    eps: float


def load_stream_norm(load: Loader, name: str, sizes: StreamSizes) -> StreamNorm:
    """The file has how far the factors are from 1."""
    weight = load.exact(f"{name}.weight", sizes.num_streams * sizes.width) + 1
    return StreamNorm(weight.view(sizes.num_streams, sizes.width), sizes.eps)


def load_mixer(load: Loader, prefix: str, sizes: StreamSizes, dtype: torch.dtype) -> StreamMixer:
    flat = sizes.num_streams * sizes.width
    return StreamMixer(
        norm=load_stream_norm(load, f"{prefix}.hc_norm", sizes),
        down=load.linear((f"{prefix}.input_mix_weight_down",), (sizes.rank,), flat),
        up=load.linear((f"{prefix}.input_mix_weight_up",), (flat,), sizes.rank),
        dtype=dtype,
    )


def load_connection(load: Loader, prefix: str, sizes: StreamSizes, dtype: torch.dtype) -> Connection:
    flat = sizes.num_streams * sizes.width
    return Connection(
        mixer=load_mixer(load, prefix, sizes, dtype),
        inject=load.linear((f"{prefix}.block_inject_weight",), (sizes.num_streams,), flat),
    )

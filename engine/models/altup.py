"""Alternating updates (Baykal et al. 2023): several residual streams, of which a layer computes one and
guesses the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.models.layers import RmsNorm
from engine.models.loading import Loader


@dataclass(frozen=True, slots=True)
class AltUp:
    """Of one layer; all is float32. `active` is the stream that the layer computes.

    `router` is [streams, width]; `predict_by` [streams * streams, streams] and `correct_by` [streams,
    streams] make coefficients of what it says.
    """

    active: int
    norm: RmsNorm
    router: torch.Tensor
    predict_by: torch.Tensor
    correct_by: torch.Tensor

    def predicted(self, streams: torch.Tensor) -> torch.Tensor:
        """[streams, tokens, width]: each stream and a mixture of all, before the layer."""
        num_streams = streams.shape[0]
        coefficients = F.linear(self._modalities(streams[self.active]), self.predict_by)
        mixed = coefficients.view(-1, num_streams, num_streams) @ streams.transpose(0, 1)
        return streams + mixed.transpose(0, 1)

    def corrected(self, predictions: torch.Tensor, activated: torch.Tensor) -> torch.Tensor:
        """[streams, tokens, width]: predictions moved by how far the active one was from `activated` [tokens,
        width], which the layer made of it."""
        coefficients = F.linear(self._modalities(activated), self.correct_by) + 1
        missed = activated - predictions[self.active]
        return predictions + coefficients.T[:, :, None] * missed

    def _modalities(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x) / x.shape[-1], self.router).tanh()


def load_altup(load: Loader, prefix: str, active: int, num_streams: int, width: int, eps: float) -> AltUp:
    def matrix(name: str, rows: int, columns: int) -> torch.Tensor:
        return load.exact(f"{prefix}.{name}.weight", rows, columns)

    return AltUp(
        active=active,
        norm=load.norm(f"{prefix}.router_norm", width, eps),
        router=matrix("modality_router", num_streams, width),
        predict_by=matrix("prediction_coefs", num_streams * num_streams, num_streams),
        correct_by=matrix("correction_coefs", num_streams, num_streams),
    )


@dataclass(frozen=True, slots=True)
class Streams:
    """From one stream to several, and back. Matrices are [streams - 1, width, width], in the model's dtype:
    the first stream has none."""

    spread: torch.Tensor
    join: torch.Tensor

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """float32 x [tokens, width] to [streams, tokens, width], all as long as x."""
        others = torch.matmul(x.to(self.spread.dtype), self.spread.mT).float()
        return torch.cat((x[None], _as_long_as(others, x)))

    def one(self, streams: torch.Tensor) -> torch.Tensor:
        """float32 [streams, tokens, width] to [tokens, width]: the mean of streams as long as the first."""
        others = torch.matmul(streams[1:].to(self.join.dtype), self.join.mT).float()
        return torch.cat((streams[:1], _as_long_as(others, streams[0]))).mean(0)


def load_streams(load: Loader, prefix: str, num_streams: int, width: int) -> Streams:
    def matrices(name: str) -> torch.Tensor:
        each = [load.tensor(f"{prefix}.{name}.{i}.weight", width, width) for i in range(num_streams - 1)]
        return torch.stack(each)

    return Streams(matrices("altup_projections"), matrices("altup_unembed_projections"))


def _as_long_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x with the root mean square of `other`, over the last axis."""
    length = x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    return x * other.square().mean(-1, keepdim=True).sqrt() / length

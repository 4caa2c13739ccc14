"""Hyper-connections with mixing matrices kept near the doubly stochastic ones (mHC, Xie et al. 2026;
DeepSeek-V4 technical report, section 2.2): several residual streams, which a block reads as one and writes to
as one.

All of it is float32 and within one token: nothing is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a block meets the streams [tokens, n, width]. `input` [tokens, width] is what the block reads;
    `post` [tokens, n] is how much of its output each stream takes, `mix` [tokens, from, to] what the streams
    take of each other."""

    streams: torch.Tensor
    input: torch.Tensor
    post: torch.Tensor
    mix: torch.Tensor

    def passed(self, output: torch.Tensor) -> torch.Tensor:
        """The streams behind the block, whose output is float32 [tokens, width]."""
        mixed = torch.bmm(self.mix.transpose(1, 2), self.streams)
        return self.post[:, :, None] * output[:, None] + mixed


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """`matrix` [n + n + n * n, n * width] makes weights for reading, writing and mixing out of all streams;
    `base` is added to them after `scale` [3]. `eps` is that of the mixing, `rms_eps` of the norm before."""

    matrix: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    iterations: int
    eps: float
    rms_eps: float

    def __call__(self, streams: torch.Tensor) -> Crossing:
        num_tokens, n, _ = streams.shape
        weights = weights_of(streams, self.matrix, self.rms_eps)
        pre, post, mix = torch.split(weights, [n, n, n * n], -1)
        pre_base, post_base, mix_base = torch.split(self.base, [n, n, n * n])
        reading = torch.sigmoid(pre * self.scale[0] + pre_base) + self.eps
        scores = (mix * self.scale[2] + mix_base).view(num_tokens, n, n)
        return Crossing(
            streams=streams,
            input=(reading[:, :, None] * streams).sum(1),
            post=2 * torch.sigmoid(post * self.scale[1] + post_base),
            mix=sinkhorn(scores, self.iterations, self.eps),
        )


@dataclass(frozen=True, slots=True)
class HyperHead:
    """One stream out of all at the end. `matrix` is [n, n * width], `base` [n], `scale` [1]."""

    matrix: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    eps: float
    rms_eps: float

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """[tokens, n, width] to [tokens, width]."""
        weights = weights_of(streams, self.matrix, self.rms_eps)
        reading = torch.sigmoid(weights * self.scale + self.base) + self.eps
        return (reading[:, :, None] * streams).sum(1)


def weights_of(streams: torch.Tensor, matrix: torch.Tensor, rms_eps: float) -> torch.Tensor:
    """[tokens, rows of `matrix`]: all streams normalised as one row, then projected."""
    flat = streams.flatten(1)
    return F.linear(F.rms_norm(flat, flat.shape[1:], None, rms_eps), matrix)


def sinkhorn(scores: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Matrices [..., from, to] with columns that sum to 1 and rows that nearly do.

    A softmax over rows, then columns and rows divided by their sums in turn, columns first and last. `eps` is
    added to every weight after the softmax and to every sum: where it stands decides the last digits.
    """
    size = scores.shape[-1]
    # Tokens last, so that sums run over all of them at once, and a row and a column of eps beside each matrix
    # to have it in every sum: matrices are small, and there are many steps.
    edged = scores.new_full((size + 1, size + 1, scores[..., 0, 0].numel()), eps)
    mix, columns, rows = edged[:size, :size], edged[:, :size], edged[:size]
    torch.add(scores.softmax(-1).view(-1, size, size).permute(1, 2, 0), eps, out=mix)
    mix.div_(columns.sum(0))
    for _ in range(iterations - 1):
        mix.div_(rows.sum(1, keepdim=True))
        mix.div_(columns.sum(0))
    return mix.permute(2, 0, 1).reshape(scores.shape)

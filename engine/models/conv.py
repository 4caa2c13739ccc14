"""Short causal convolutions, one filter a channel: each value is mixed with the few before it.

What is remembered is the last inputs, as they were before the convolution; before the first token they are
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.trail import newest_windows
from engine.errors import WeightsRefused
from engine.models.loading import Loader


@dataclass(frozen=True, slots=True)
class ShortConv:
    """`weight` float32 [channels, kernel], of which the last column meets the newest input, and `bias`
    [channels]. What acts on the result (SiLU, as a rule) is the caller's."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def state_shape(self) -> tuple[int, int]:
        """The last kernel - 1 inputs, oldest first."""
        channels, kernel = self.weight.shape
        return kernel - 1, channels

    def __call__(
        self, x: torch.Tensor, state: torch.Tensor, newest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` float32 [segments, tokens, channels] after `state` [segments, *state_shape]; returns the
        output, shaped like `x`, and the states after its `newest` last tokens, [segments, newest,
        *state_shape].

        Products are summed tap after tap, so that a value does not depend on how the tokens are cut.
        """
        num_tokens, kernel = x.shape[1], self.weight.shape[1]
        line = torch.cat((state, x), dim=1)
        out = line[:, :num_tokens] * self.weight[:, 0]
        for tap in range(1, kernel):
            out = torch.addcmul(out, line[:, tap : tap + num_tokens], self.weight[:, tap])
        if self.bias is not None:
            out = out + self.bias
        return out, newest_windows(line, kernel - 1, newest)


def load_conv(load: Loader, name: str, channels: int, kernel: int) -> ShortConv:
    """From `name`.weight [channels, 1, kernel], with `name`.bias where the file has it. Raises
    WeightsRefused, for a kernel that remembers nothing too."""
    if kernel < 2:
        raise WeightsRefused(f"{name}: a convolution over {kernel} tokens is not supported")
    weight = load.exact(f"{name}.weight", channels, 1, kernel)[:, 0]
    bias = load.exact(f"{name}.bias", channels) if load.has(f"{name}.bias") else None
    return ShortConv(weight, bias)

"""Rotary position embeddings: which angle every pair of a head turns by, and turning it.

The half-split convention everywhere: value i of a head is paired with value i + n_rot/2 (files in another
order are put into this one when they are read). Frequencies and angles are float32 whatever the model
computes in: a bf16 frequency has 8 bits, and is off by a whole turn at position 4,000. They are float32 and
no more, since the models were trained so: with angles in float64 Gemma 3's logits at position 1,183 are
0.005 away from the reference's, four times as far as by all other rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.errors import WeightsRefused


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of some positions, float32 [tokens, 1, n_rot], the magnitude in them.

    The sines of the first half are negative, so that turning is `x * cos + swapped(x) * sin`.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of one kind of layer.

    `inv_freq` is float32 [n_rot/2] on the host, in radians a position. `magnitude` scales the rotated
    values (YaRN's attention factor); keys that are moved later are not scaled again.
    """

    inv_freq: torch.Tensor
    magnitude: float = 1.0

    @property
    def n_rot(self) -> int:
        """How many values of a head turn; the ones behind them stay as they are."""
        return 2 * self.inv_freq.numel()

    def angles(self, positions: torch.Tensor, device: torch.device | None = None) -> Angles:
        """The angles of `positions` (integers [tokens]), on `device` or else where they are."""
        turns = positions.to("cpu", torch.float32)[:, None] * self.inv_freq
        return _angles(turns, self.magnitude, positions.device if device is None else device)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, heads, head size] put at `positions` [tokens], in x's dtype."""
        return turn(x, self.angles(positions, x.device))

    def rerotate(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Already rotated `x` [tokens, heads, head size], moved by `delta` [tokens] positions.

        Free of the magnitude, which the first rotation has applied.
        """
        turns = delta.to("cpu", torch.float64)[:, None] * self.inv_freq
        return turn(x, _angles(turns, 1.0, x.device))


def _angles(turns: torch.Tensor, magnitude: float, device: torch.device) -> Angles:
    """`turns` is in radians [tokens, n_rot/2]."""
    wide = turns.to(torch.float64)
    cos, sin = wide.cos() * magnitude, wide.sin() * magnitude
    both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
    cos, sin = both.to(torch.float32)[:, :, None].to(device)
    return Angles(cos, sin)


def turn(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """`x` [tokens, heads, head size] turned by `angles`: computed in float32, returned in x's dtype."""
    n_rot = angles.cos.shape[-1]
    if n_rot < x.shape[-1]:
        return torch.cat((turn(x[..., :n_rot], angles), x[..., n_rot:]), -1)
    wide = x.float()
    return torch.addcmul(wide * angles.cos, wide.roll(n_rot // 2, -1), angles.sin).to(x.dtype)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a family stretches its frequencies. `kind` is one of SCALINGS; what a kind does not use is ignored.

    `original_context` is the length the model was first trained on. `factors` are divisors of the
    frequencies, [n_rot/2] (llama3's and longrope's, as the file has them). `attention_factor` overrides
    the magnitude that a kind would choose. YaRN's ramp has whole pairs for its ends, or else what the
    formula gives.
    """

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    factors: torch.Tensor | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extrapolation: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    whole_pairs: bool = True


SCALINGS = ("none", "linear", "llama3", "yarn", "longrope", "dynamic")


def build_rotary(n_rot: int, base: float, scaling: RopeScaling, n_ctx: int) -> Rotary:
    """The rotary of a layer for sequences of up to `n_ctx` tokens.

    Raises WeightsRefused for a scaling that this engine does not know or that lacks a value.
    """
    if n_rot <= 0 or n_rot % 2:
        raise WeightsRefused(f"RoPE over {n_rot} values of a head: there must be an even number of them")
    magnitude = 1.0
    if scaling.kind == "dynamic":
        base = _dynamic_base(n_rot, base, scaling, n_ctx)
    # The formula of the reference implementations, in float32, for the same frequencies to the last bit.
    inv_freq = 1.0 / (base ** (torch.arange(0, n_rot, 2, dtype=torch.int64).float() / n_rot))
    if scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling.kind == "llama3" and scaling.factors is None:
        inv_freq = inv_freq / llama3_factors(inv_freq, scaling)
    elif scaling.kind == "yarn":
        inv_freq, magnitude = _yarn(inv_freq, base, scaling)
    elif scaling.kind == "longrope":
        magnitude = _longrope_magnitude(scaling)
    elif scaling.kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise WeightsRefused(f"RoPE scaling {scaling.kind!r} is not known (known: {known})")
    if scaling.factors is not None:
        if scaling.factors.numel() != inv_freq.numel():
            raise WeightsRefused(
                f"RoPE factors: {scaling.factors.numel()} for {inv_freq.numel()} frequencies of a head"
            )
        inv_freq = inv_freq / scaling.factors.float().cpu()
    if scaling.attention_factor is not None:
        magnitude = scaling.attention_factor
    return Rotary(inv_freq, magnitude)


def llama3_factors(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's divisors: long waves by `factor`, short ones by 1, a blend between."""
    turns = _original(scaling) * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (turns - low) / (high - low)
    blended = 1.0 / ((1 - smooth) / scaling.factor + smooth)
    long = torch.full_like(inv_freq, scaling.factor)
    return torch.where(turns < low, long, torch.where(turns > high, torch.ones_like(inv_freq), blended))


def _yarn(inv_freq: torch.Tensor, base: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate the long waves, keep the short ones, ramp between."""
    half = inv_freq.numel()

    def dimension(rotations: float) -> float:
        """The pair that turns `rotations` times over the original context."""
        return 2 * half * math.log(_original(scaling) / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = (1 - ramp) * scaling.extrapolation
    magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return inv_freq / scaling.factor * (1 - keep) + inv_freq * keep, magnitude


def _longrope_magnitude(scaling: RopeScaling) -> float:
    if scaling.factors is None:
        raise WeightsRefused("RoPE scaling longrope: the model has no factors")
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(_original(scaling)))


def _dynamic_base(n_rot: int, base: float, scaling: RopeScaling, n_ctx: int) -> float:
    """NTK scaling for the whole context at once: a base that changed as the text grew would leave the
    keys that are stored already behind."""
    stretch = scaling.factor * max(n_ctx, _original(scaling)) / _original(scaling) - (scaling.factor - 1)
    return float(base * stretch ** (n_rot / (n_rot - 2)))


def _original(scaling: RopeScaling) -> int:
    if scaling.original_context <= 0:
        raise WeightsRefused(f"RoPE scaling {scaling.kind}: the model does not say its original context")
    return scaling.original_context

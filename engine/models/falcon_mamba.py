"""Falcon Mamba (Zuo et al. 2024, "Falcon Mamba", section 2): Mamba, with norms without weights on step sizes
and on the state's input and output."""

from __future__ import annotations

import torch

from engine.models.base import Placement
from engine.models.fields import Fields
from engine.models.layers import RmsNorm
from engine.models.mamba import Mamba
from engine.models.ssm1 import Norms, Ssm1Sizes


class FalconMamba(Mamba):
    """See `Model`."""

    def _norms(self, fields: Fields, placement: Placement, sizes: Ssm1Sizes) -> Norms:
        eps = fields.positive("mixer_rms_eps", 1e-6)
        dt, b, c = (RmsNorm(torch.ones(width, device=placement.device), eps) for width in sizes.shared)
        return dt, b, c

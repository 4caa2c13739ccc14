"""Multi-token prediction: layers behind a model's own that guess what comes after the next token
(DeepSeek-V3 technical report, section 2.2).

Depth d reads, for position t, the hidden state that the depth before it left there (depth 0: the model's own,
after its last norm) and token t + 1 + d, and guesses token t + 2 + d. Embedding and output matrix are the
model's. A depth leaves one row for each t, in a memory whose position is t; its keys are turned as of the
position of the token, t + 1 + d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.cache.memory import MemoryNeeds, View
from engine.linear import Linear
from engine.models.base import Placement
from engine.models.decoder import Block, Ends, Pass
from engine.models.layers import RmsNorm
from engine.rope import Rotary


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """One depth. `join` takes the normed embedding and behind it the normed hidden state."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    join: Linear
    block: Block
    norm: RmsNorm


class Mtp:
    """All depths of one model, and the model's `ends`."""

    def __init__(
        self,
        needs: MemoryNeeds,
        layers: Sequence[MtpLayer],
        rotaries: Mapping[str, Rotary],
        ends: Ends,
        placement: Placement,
    ) -> None:
        """`needs` are the layers' rows, `rotaries` are by the kind of layer."""
        self.needs = needs
        self._layers = tuple(layers)
        self._rotaries = rotaries
        self._ends = ends
        self._placement = placement

    @property
    def num_depths(self) -> int:
        return len(self._layers)

    @property
    def width(self) -> int:
        """Values of a hidden state."""
        return self._ends.embedding.shape[1]

    def step(
        self, depth: int, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, view: View
    ) -> torch.Tensor:
        """What `depth` leaves, float32 [n, width], at `positions` int64 [n] on the host, the t of the
        module's words. `hidden` float32 [n, width] is what was left there before it, `tokens` int64 [n] are
        those at t + 1 + depth. Its rows are stored through `view`."""
        layer, device, dtype = self._layers[depth], self._placement.device, self._placement.dtype
        embedded = layer.embedding_norm(self._ends.embed(tokens))
        both = torch.cat((embedded, layer.hidden_norm(hidden.to(device))), -1)
        turned = positions + 1 + depth
        angles = {kind: rotary.angles(turned, device) for kind, rotary in self._rotaries.items()}
        x = layer.join(both.to(dtype)).float()
        return layer.norm(layer.block(x, Pass(view, turned.to(device), angles, dtype)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of some rows that `step` gave."""
        return self._ends.logits_of(hidden)

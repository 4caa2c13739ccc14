"""The frame that decoders of the hub share: embedding, blocks one after the other, norm, output matrix.

A family says what its blocks are; each takes the residual stream and what all layers of a pass share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, View, WindowSpec, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, digest_of_frequencies
from engine.models.fields import Fields
from engine.models.layers import LayerNorm, RmsNorm
from engine.models.sizes import Sizes
from engine.rope import Angles, Rotary
from engine.state import Value


@dataclass(frozen=True, slots=True)
class Pass:
    """What the layers of one pass share. `positions` is int64 [tokens] on the model's device, `angles` go by
    the word for the kind of layer; matrices are multiplied in `dtype`."""

    view: View
    positions: torch.Tensor
    angles: Mapping[str, Angles]
    dtype: torch.dtype


#: x float32 [tokens, width] to the same after one layer
Block = Callable[[torch.Tensor, Pass], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands before the blocks and behind them. Logits are `softcap * tanh(logit_scale * head(...) /
    softcap)`."""

    embedding: torch.Tensor
    norm: RmsNorm | LayerNorm
    head: Linear
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, width]."""
        x = F.embedding(tokens.to(self.embedding.device), self.embedding).float()
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [outputs, vocab] of float32 x [outputs, width]."""
        return self.logits_of(self.norm(x))

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` of what the norm has given."""
        logits = self.head(hidden.to(self.embedding.dtype)).float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def grouped_needs(sizes: Sizes, layers: Sequence[tuple[Rotary | None, WindowSpec | None]]) -> MemoryNeeds:
    """Keys and values of every layer, with the rotary that turns its keys and its window."""
    parts: list[PartNeed] = []
    for layer, (rotary, window) in enumerate(layers):
        parts += keys_and_values(layer, sizes.num_kv_heads, sizes.head_size, sizes.head_size, rotary, window)
    return MemoryNeeds("iswa" if any(window for _, window in layers) else "kv", tuple(parts))


class Frame:
    """All of a `Model` but its forward. `rotaries` are by the kind of layer."""

    def __init__(
        self,
        architecture: str,
        fields: Fields,
        sizes: Sizes,
        placement: Placement,
        needs: MemoryNeeds,
        rotaries: Mapping[str, Rotary],
        ends: Ends,
    ) -> None:
        self._architecture = architecture
        self._fields = fields
        self._sizes = sizes
        self._placement = placement
        self._needs = needs
        self._rotaries = rotaries
        self._ends = ends

    @property
    def needs(self) -> MemoryNeeds:
        return self._needs

    @property
    def vocab_size(self) -> int:
        return self._sizes.vocab_size

    @property
    def n_ctx_train(self) -> int:
        return self._sizes.n_ctx_train

    @property
    def ends(self) -> Ends:
        return self._ends

    @property
    def meaning(self) -> Mapping[str, Value]:
        return {
            "architecture": self._architecture,
            **self._fields.meaning,
            "rope.frequencies": digest_of_frequencies(self._needs),
        }

    def _pass(self, positions: torch.Tensor, view: View) -> Pass:
        device = self._placement.device
        angles = {kind: rotary.angles(positions, device) for kind, rotary in self._rotaries.items()}
        return Pass(view, positions.to(device), angles, self._placement.dtype)


class Decoder(Frame):
    """See `Trunk`. Its blocks need nothing but the residual stream and the pass."""

    def __init__(
        self,
        architecture: str,
        fields: Fields,
        sizes: Sizes,
        placement: Placement,
        needs: MemoryNeeds,
        rotaries: Mapping[str, Rotary],
        ends: Ends,
        blocks: Sequence[Block],
    ) -> None:
        super().__init__(architecture, fields, sizes, placement, needs, rotaries, ends)
        self._blocks = tuple(blocks)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        x = self._stream(tokens, positions, view)
        return self._ends.logits(x[outputs.to(x.device)])

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, view: View) -> torch.Tensor:
        return self._ends.norm(self._stream(tokens, positions, view))

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ends.logits_of(hidden)

    def _stream(self, tokens: torch.Tensor, positions: torch.Tensor, view: View) -> torch.Tensor:
        """float32 [tokens, width] behind the last block."""
        step = self._pass(positions, view)
        x = self._ends.embed(tokens)
        for block in self._blocks:
            x = block(x, step)
        return x

"""Passes of one shape in which every token has a place of its own, for bits that depend on nothing beside it.

A kernel goes about a product by how many rows it has, and the last values of a tensor take another path
through an elementwise function than those before them. So who shares a pass with whom shows in the last bits.
Here a pass has NUM_PLACES rows whatever is in it, and the token at position p is computed in row p modulo
NUM_PLACES, by the very same calls whether it is alone or beside others, of its own sequence or another's.
Rows look at each other through the memory alone, where each token is a segment of its own.

A run of up to NUM_PLACES tokens is one pass, wherever it begins. Sequences share passes where their tokens
have different places.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import NUM_PLACES, Ints, Segment, Ubatch
from engine.cache.memory import Chosen, Held, View
from engine.models.base import Model, Trunk
from engine.shapes import fixed_shapes


def run_pass(
    model: Model, trunk: Trunk | None, ubatch: Ubatch, view: View
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits float32 [outputs, vocab] of the rows that `ubatch` wants them of, and the hidden states
    float32 [tokens, width] of all, where `trunk` is the model again."""
    outputs = torch.from_numpy(np.flatnonzero(ubatch.outputs))
    if ubatch.places is None:
        tokens, positions = torch.from_numpy(ubatch.tokens), torch.from_numpy(ubatch.positions)
        return _forward(model, trunk, tokens, positions, view, outputs)
    places = Places(ubatch.places)
    # Of all rows or of none: that too is one shape.
    every = torch.arange(NUM_PLACES if len(outputs) else 0)
    tokens, positions = (torch.from_numpy(of[places.sources]) for of in (ubatch.tokens, ubatch.positions))
    with fixed_shapes():
        logits, hidden = _forward(model, trunk, tokens, positions, PlacedView(view, places), every)
    wanted = torch.from_numpy(places.rows[ubatch.outputs]).to(logits.device)
    return logits[wanted], None if hidden is None else places.taken(hidden)


def _forward(
    model: Model,
    trunk: Trunk | None,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    view: View,
    outputs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if trunk is None:
        return model.forward(tokens, positions, view, outputs), None
    hidden = trunk.hidden(tokens, positions, view)
    return trunk.logits_of(hidden[outputs.to(hidden.device)]), hidden


class Places:
    """Which row of the pass each token of a ubatch is in. The other rows are copies of its first token's:
    what they give is not looked at, and they lead to no expert that is not asked anyway.

    `rows` [tokens] are those of the tokens, no two the same; `sources` [NUM_PLACES] the tokens of the rows.
    """

    def __init__(self, rows: Ints) -> None:
        self.rows = rows
        self.sources = np.zeros(NUM_PLACES, np.int64)
        self.sources[rows] = np.arange(len(rows))
        self._rows, self._sources = torch.from_numpy(self.rows), torch.from_numpy(self.sources)

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """Of [NUM_PLACES, ...] those of the tokens, [tokens, ...]."""
        self._rows = self._rows.to(x.device)  # of a GPU's tensors it is asked many times, and moved once
        return x.index_select(0, self._rows)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] to [NUM_PLACES, ...]."""
        self._sources = self._sources.to(x.device)
        return x.index_select(0, self._sources)


class PlacedView:
    """See `memory.View`: a ubatch as a pass of NUM_PLACES rows sees it. Its segments are the tokens', in the
    order of the ubatch, at their places."""

    def __init__(self, view: View, places: Places) -> None:
        self._view = view
        self._places = places
        rows = places.rows.tolist()
        placed = (Segment(of.seq, row, row + 1) for of, row in zip(view.segments, rows, strict=True))
        self._inner = dict(zip(placed, view.segments, strict=True))
        self.segments = tuple(self._inner)
        self.positions: Ints = view.positions[places.sources]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        scale: float,
        softcap: float | None = None,
        *,
        sinks: torch.Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> torch.Tensor:
        """See `memory.View.attend`."""
        taken = self._places.taken
        k, v = (None if rows is None else taken(rows) for rows in (k, v))
        attended = self._view.attend(layer, taken(q), k, v, scale, softcap, sinks=sinks, chosen=chosen)
        return self._places.spread(attended)

    def append(self, name: str, layer: int, rows: torch.Tensor) -> None:
        """See `memory.View.append`."""
        self._view.append(name, layer, self._places.taken(rows))

    def held(self, name: str, layer: int, segment: Segment) -> Held:
        """See `memory.View.held`."""
        return self._view.held(name, layer, self._inner[segment])

    def into_basis(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """See `memory.View.into_basis`."""
        return self._view.into_basis(name, layer, x)

    def out_of_basis(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        """See `memory.View.out_of_basis`."""
        return self._view.out_of_basis(name, layer, x)

    def close(self, name: str, layer: int, segment: Segment, rows: torch.Tensor) -> None:
        """See `memory.View.close`."""
        self._view.close(name, layer, self._inner[segment], rows)

    def blocks(self, name: str, layer: int, segment: Segment) -> torch.Tensor:
        """See `memory.View.blocks`."""
        return self._view.blocks(name, layer, self._inner[segment])

    def point(self, name: str, layer: int) -> torch.Tensor:
        """See `memory.View.point`."""
        return self._view.point(name, layer)

    @property
    def newest(self) -> int:
        """See `memory.View.newest`."""
        return self._view.newest

    def set_point(self, name: str, layer: int, states: torch.Tensor) -> None:
        """See `memory.View.set_point`."""
        self._view.set_point(name, layer, states)

    def previous_tokens(self, count: int) -> Ints:
        """See `memory.View.previous_tokens`."""
        found: Ints = self._view.previous_tokens(count)[self._places.sources]
        return found

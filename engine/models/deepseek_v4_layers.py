"""The layers of DeepSeek-V4: attention over a window and the blocks behind it, and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.batch import Segment
from engine.cache.attention import Scoring
from engine.cache.dsv4 import attend_both, choose, closed_at, closing
from engine.cache.memory import KEYS, View, WindowSpec
from engine.cache.trail import newest_windows
from engine.linear import Linear
from engine.models.deepseek_v4_config import LayerKind
from engine.models.hyper import HyperConnection
from engine.models.layers import RmsNorm
from engine.models.moe import by_expert
from engine.parallel.ranks import Ranks
from engine.rope import Angles, Rotary, turn


@dataclass(frozen=True, slots=True)
class Compressor:
    """Makes rows of blocks. `rows` and `ring` are the names of its parts; `pool` and `bias` [ratio, width]
    are those of `engine.cache.dsv4`."""

    layer: int
    rows: str
    ring: str
    pool: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
    bias: torch.Tensor
    norm: RmsNorm
    rotary: Rotary

    def store(self, lines: torch.Tensor, view: View) -> None:
        """Store the rows of the blocks that close, and keep what the next one will need. `lines` is [tokens,
        2 * width] as projected, u and then z."""
        ring = view.point(self.ring, self.layer)
        num_kept, _, width = ring.shape[1:]
        known = torch.cat((ring, lines.float().view(len(ring), -1, 2, width)), 1)
        view.set_point(self.ring, self.layer, newest_windows(known, num_kept, view.newest))
        for segment, of_segment in zip(view.segments, known, strict=True):
            first, ratio = int(view.positions[segment.start]), len(self.bias)
            numbers = closing(first, segment.stop - segment.start, ratio)
            if not numbers:
                continue
            rows = self.norm(self.pool(of_segment, first, self.bias))
            at = torch.arange(numbers.start, numbers.stop) * ratio
            turned = turn(rows[:, None], self.rotary.angles(at, rows.device))
            view.close(self.rows, self.layer, segment, turned[:, 0])

    def blocks(self, segment: Segment, view: View) -> torch.Tensor:
        """[blocks, size], in the basis that they are stored in."""
        return view.blocks(self.rows, self.layer, segment)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses `count` blocks for each query, by rows of its own. `queries` reads the latent of q."""

    compressor: Compressor
    queries: Linear
    count: int

    def choose(
        self,
        latent: torch.Tensor,
        lines: torch.Tensor,
        weights: torch.Tensor,
        closed: list[torch.Tensor],
        angles: Angles,
        view: View,
    ) -> list[torch.Tensor]:
        """Of each segment's `closed` blocks those that are read. `weights` [tokens, heads] as projected."""
        compressor, size = self.compressor, self.compressor.norm.weight.numel()
        compressor.store(lines, view)
        q = turn(self.queries(latent).view(len(latent), -1, size), angles)
        q = view.into_basis(compressor.rows, compressor.layer, q)
        # Scores are not scaled: a factor that they share would change no choice.
        return [
            choose(
                q[segment.start : segment.stop],
                weights[segment.start : segment.stop].float(),
                compressor.blocks(segment, view),
                seen,
                self.count,
            )
            for segment, seen in zip(view.segments, closed, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries through a latent, one row a token that is key and value at once, and a low-rank output of
    groups of heads.

    `inputs` makes of x the latent of q, the row, the lines of the compressor, those of the indexer and its
    heads' weights: `rows` values of each. `compressor` is None in layers without blocks, `indexer` in those
    that read all of them. RoPE turns the first values of a head.
    """

    layer: int
    inputs: Linear
    rows: list[int]
    q_norm: RmsNorm
    queries: Linear
    row_norm: RmsNorm
    sinks: torch.Tensor
    out_down: torch.Tensor  # [groups, rank, values of a group's heads]
    out_up: Linear
    window: WindowSpec
    compressor: Compressor | None
    indexer: Indexer | None

    def __call__(self, x: torch.Tensor, angles: Angles, view: View) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        size = self.row_norm.weight.numel()
        flat_q, flat_row, lines, index_lines, index_weights = torch.split(self.inputs(x), self.rows, -1)
        latent = self.q_norm(flat_q.float()).to(x.dtype)
        q = self.queries(latent).view(len(x), -1, size).float()
        q = turn(F.rms_norm(q, (size,), None, self.q_norm.eps), angles).to(x.dtype)
        row = turn(self.row_norm(flat_row.float())[:, None], angles).to(x.dtype)
        if self.compressor is None:
            out = view.attend(self.layer, q, row, None, size**-0.5, sinks=self.sinks)
        else:
            view.append(KEYS, self.layer, row)
            self.compressor.store(lines, view)
            seen = [self._closed(self.compressor, segment, view) for segment in view.segments]
            if self.indexer is not None:
                seen = self.indexer.choose(latent, index_lines, index_weights, seen, angles, view)
            out = self._attend(self.compressor, q, seen, view)
        # Values were turned as keys are. Turned back by the query's position, they know but distances.
        out = turn(out, Angles(angles.cos, -angles.sin))
        groups = out.reshape(len(x), len(self.out_down), -1).transpose(0, 1)
        low = torch.bmm(groups, self.out_down.transpose(1, 2))
        return self.out_up(low.transpose(0, 1).reshape(len(x), -1))

    def _closed(self, compressor: Compressor, segment: Segment, view: View) -> torch.Tensor:
        at = view.positions[segment.start : segment.stop]
        return closed_at(at, len(compressor.bias), compressor.bias.device)

    def _attend(
        self, compressor: Compressor, q: torch.Tensor, seen: list[torch.Tensor], view: View
    ) -> torch.Tensor:
        q = view.into_basis(KEYS, self.layer, q)
        scoring = Scoring(q.shape[-1] ** -0.5, sinks=self.sinks)
        out = [
            attend_both(
                q[segment.start : segment.stop],
                view.positions[segment.start : segment.stop],
                view.held(KEYS, self.layer, segment),
                self.window,
                compressor.blocks(segment, view),
                picked,
                scoring,
            )
            for segment, picked in zip(view.segments, seen, strict=True)
        ]
        return view.out_of_basis(KEYS, self.layer, torch.cat(out))


#: float32 logits of a router to positive scores
SCORING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class ByScore:
    """The `count` experts with the best scores after a bias that balances the load."""

    bias: torch.Tensor
    count: int

    def __call__(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (scores + self.bias).topk(self.count).indices


@dataclass(frozen=True, slots=True)
class ByToken:
    """The experts that a table, int64 [vocab, k], has for a token's id."""

    table: torch.Tensor

    def __call__(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


@dataclass(frozen=True, slots=True)
class Gated:
    """down(silu(gate) * up), the gate at most `limit` and up within it."""

    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * inner], the gate's values first, to [..., inner]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class Experts:
    """A shared expert, and some of many; scores weigh these, whatever chose them."""

    router: Linear  # float32
    scoring: Callable[[torch.Tensor], torch.Tensor]
    choice: ByScore | ByToken
    scale: float
    gate_up: torch.Tensor  # [experts, 2 * inner, width]
    down: torch.Tensor  # [experts, width, inner]
    shared_gate_up: Linear
    shared_down: Linear
    gated: Gated
    ranks: Ranks

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, width] to the same; `tokens` are ids."""
        scores = self.scoring(self.router(x))
        chosen = self.choice(scores, tokens)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
        rows = x.to(self.down.dtype)
        shared = self.shared_down(self.gated(self.shared_gate_up(rows))).float()
        return self.ranks.total(by_expert(rows, chosen, weights, self._expert) + shared)

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.gated(F.linear(x, self.gate_up[number])), self.down[number])


@dataclass(frozen=True, slots=True)
class DeepSeekV4Block:
    kind: LayerKind
    attention_streams: HyperConnection
    attention_norm: RmsNorm
    attention: Attention
    ffn_streams: HyperConnection
    ffn_norm: RmsNorm
    experts: Experts

    def __call__(
        self, streams: torch.Tensor, tokens: torch.Tensor, angles: Angles, view: View
    ) -> torch.Tensor:
        """float32 [tokens, n, width] to the same."""
        crossing = self.attention_streams(streams)
        x = self.attention_norm(crossing.input).to(self.experts.down.dtype)
        crossing = self.ffn_streams(crossing.passed(self.attention(x, angles, view).float()))
        return crossing.passed(self.experts(self.ffn_norm(crossing.input), tokens))

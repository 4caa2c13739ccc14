"""Trails: the point state of a sequence after each of the last tokens of its last batch, to go back to.

A pass hands over the states after its last tokens, and a trail keeps them beside the live one, each at its
position. It takes effect when its batch is committed and goes with the next one of its sequence. So what is
kept is true or not there: nothing is pending, and nothing can be applied twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.batch import Ubatch, counts_of
from engine.cache.parts import Key
from engine.cache.points import Frozen
from engine.state import SeqId


@dataclass(frozen=True, slots=True)
class Run:
    """What one pass left of one sequence: of each part the states [n, *shape] after consecutive tokens, of
    which the last stands at position `end`."""

    end: int
    states: dict[Key, torch.Tensor] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return self.end + 1 - min(len(states) for states in self.states.values())

    def add(self, key: Key, states: torch.Tensor) -> None:
        # Those of several sequences lie together, and all would stay for as long as any of them does.
        lean = states.untyped_storage().nbytes() <= states.nbytes
        self.states[key] = states if lean else states.clone(memory_format=torch.contiguous_format)

    def at(self, position: int, keys: Iterable[Key]) -> Frozen:
        rows = (self.states[key][position - 1 - self.end] for key in keys)
        return tuple(row.contiguous().view(-1).view(torch.uint8) for row in rows)


@dataclass(frozen=True, slots=True)
class Steps:
    """What a pass is asked for: the `newest` states of every segment. `runs`, by the segment's index, take
    those that are kept."""

    newest: int = 1
    runs: Mapping[int, Run] = field(default_factory=dict)

    def add(self, key: Key, states: torch.Tensor) -> None:
        """`states` is float32 [segments, newest, *shape], not to be changed any more."""
        for segment, run in self.runs.items():
            run.add(key, states[segment])


@dataclass(frozen=True, slots=True)
class Trail:
    """The states at positions [first, stop), in `runs` that follow each other."""

    first: int = 0
    stop: int = 0
    runs: tuple[Run, ...] = ()

    @property
    def positions(self) -> range:
        return range(self.first, self.stop)

    def run_at(self, position: int) -> Run:
        return next(run for run in self.runs if position <= run.end)

    def cut(self, length: int) -> Trail:
        """What is left where the sequence is cut to `length`, at which its live state stands then."""
        return replace(self, stop=min(self.stop, length)) if length > self.first else Trail()


class Trails:
    """The trail of every sequence, up to `depth` states each; forks share the tensors, which are never
    changed. So there are at most `depth` times as many bytes as live ones (and one more while they lie
    together), whatever is drafted."""

    def __init__(self, num_seqs: int, depth: int, keys: Iterable[Key]) -> None:
        self._by_seq = [Trail()] * num_seqs
        self._depth = depth
        self._keys = tuple(keys)

    def positions(self, seq: SeqId) -> range:
        """Where a sequence can go back to, rising; never its end, where its live state stands."""
        return self._by_seq[seq].positions

    def at(self, seq: SeqId, position: int) -> Frozen | None:
        trail = self._by_seq[seq]
        return trail.run_at(position).at(position, self._keys) if position in trail.positions else None

    def cut(self, seq: SeqId, length: int) -> None:
        """Forget those at `length` and beyond."""
        self._by_seq[seq] = self._by_seq[seq].cut(length)

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        """`target` has those of `source` that are before `length`."""
        self._by_seq[target] = self._by_seq[source].cut(length)

    def begin(self, ubatches: Sequence[Ubatch]) -> NewTrails:
        """The trails of one batch; nothing changes before they are kept."""
        return NewTrails(ubatches, self._depth if self._keys else 0)

    def keep(self, new: NewTrails) -> None:
        """In place of what the sequences of a batch had."""
        for seq, trail in new.trails():
            self._by_seq[seq] = trail


class NewTrails:
    """The trails of one batch while its ubatches are computed."""

    def __init__(self, ubatches: Sequence[Ubatch], depth: int) -> None:
        batch = ubatches[0].batch
        seqs = counts_of(batch) if depth else ()
        self._depth = depth
        self._ends = {seq: int(batch.positions[batch.seqs == seq][-1]) + 1 for seq, _ in seqs}
        self._runs: dict[SeqId, list[Run]] = {seq: [] for seq in self._ends}

    def steps(self, ubatch: Ubatch) -> Steps:
        """What the pass over `ubatch` is to give. Where more of a sequence follows, little or nothing is kept
        of it."""
        if not self._depth:
            return Steps()
        newest, runs = 1, {}
        for index, segment in enumerate(ubatch.segments):
            end = int(ubatch.positions[segment.stop - 1]) + 1
            wanted = min(self._depth + 1 - (self._ends[segment.seq] - end), segment.stop - segment.start)
            newest = max(newest, wanted)
            if wanted > 1 or (wanted == 1 and end < self._ends[segment.seq]):
                runs[index] = Run(end)
                self._runs[segment.seq].append(runs[index])
        return Steps(newest, runs)

    def trails(self) -> Iterable[tuple[SeqId, Trail]]:
        for seq, runs in self._runs.items():
            end = self._ends[seq]
            first = max(runs[0].first, end - self._depth) if runs else end
            yield seq, Trail(first, end, tuple(runs))


def newest_windows(line: torch.Tensor, size: int, newest: int) -> torch.Tensor:
    """The last `size` rows as they were after each of the `newest` last ones, oldest first: [segments,
    newest, size, ...] of `line` [segments, rows, ...]. They overlap in memory, and keep nothing else."""
    if newest == 1:
        return line[:, None, line.shape[1] - size :]
    # A view of the whole line would keep a prompt's inputs for the sake of the last few.
    tail = line[:, line.shape[1] - size - newest + 1 :].clone(memory_format=torch.contiguous_format)
    return tail.unfold(1, size, 1).movedim(-1, 2)

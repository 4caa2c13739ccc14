"""Rank 0's memory of a model that ranks share: what is done to it is done on every rank.

All ranks have the same cell tables, since they hear of the same batches and edits in the same order; each has
the rows of its own heads. A verb is done here first, and told when it has not failed: so no rank is ever told
what cannot be done. What is told goes out together with what needs an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Batch, Ubatch
from engine.cache.memory import Memory, MemoryNeeds, View
from engine.cache.memory import Plan as MemoryPlan
from engine.parallel.group import Group
from engine.parallel.messages import Apply, Commit, Edit, Plan, Restore, Rollback, Snapshot
from engine.parallel.signals import Deferral, undivided
from engine.parallel.slices import Slices
from engine.parallel.wire import Wire
from engine.state import Layout, Point, Rows, Run, SeqId, parts_of


class ParallelMemory:
    """See `memory.Memory`. `layout` and all that leaves or enters is the whole model's."""

    def __init__(self, local: Memory, needs: MemoryNeeds, wire: Wire) -> None:
        """`local` has rank 0's part of what is needed."""
        self._local = local
        self._wire = wire
        self._slices = Slices.of(local.layout, needs, wire.group.share.size)
        self._passes = Passes(wire.group)

    @property
    def layout(self) -> Layout:
        return self._slices.layout

    @property
    def rotated(self) -> tuple[str, ...]:
        return self._local.rotated

    def plan(self, batch: Batch) -> ParallelPlan:
        plan = self._local.plan(batch)
        self._wire.tell(Plan.of(batch))
        return ParallelPlan(plan, self._wire, self._passes)

    # -- edits -------------------------------------------------------------------------------------

    def remove(self, seq: SeqId | None, start: int, stop: int | None) -> None:
        self._local.remove(seq, start, stop)
        self._wire.tell(Edit("remove", (seq, start, stop)))

    def copy(self, source: SeqId, target: SeqId, start: int = 0, stop: int | None = None) -> None:
        self._local.copy(source, target, start, stop)
        self._wire.tell(Edit("copy", (source, target, start, stop)))

    def keep(self, seq: SeqId) -> None:
        self._local.keep(seq)
        self._wire.tell(Edit("keep", (seq,)))

    def shift(self, seq: SeqId | None, start: int, stop: int | None, delta: int) -> None:
        self._local.shift(seq, start, stop, delta)
        self._wire.tell(Edit("shift", (seq, start, stop, delta)))

    def discard(self, seq: SeqId, start: int, stop: int) -> None:
        self._local.discard(seq, start, stop)
        self._wire.tell(Edit("discard", (seq, start, stop)))

    def divide(self, seq: SeqId | None, start: int, stop: int | None, divisor: int) -> None:
        self._local.divide(seq, start, stop, divisor)
        self._wire.tell(Edit("divide", (seq, start, stop, divisor)))

    def mark(self, seq: SeqId) -> None:
        self._local.mark(seq)
        self._wire.tell(Edit("mark", (seq,)))

    # -- questions ---------------------------------------------------------------------------------

    def refuse_shift(self) -> str | None:
        return self._local.refuse_shift()

    def drops_rows(self) -> bool:
        return self._local.drops_rows()

    def pos_min(self, seq: SeqId) -> int | None:
        return self._local.pos_min(seq)

    def pos_max(self, seq: SeqId) -> int | None:
        return self._local.pos_max(seq)

    def can_resume_at(self, seq: SeqId, position: int) -> bool:
        return self._local.can_resume_at(seq, position)

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        return self._local.last_resumable(seq, at_most)

    def free_cells(self) -> int:
        return self._local.free_cells()

    def tokens_at(self, seq: SeqId, start: int, stop: int) -> tuple[int, ...]:
        return self._local.tokens_at(seq, start, stop)

    # -- states ------------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> tuple[tuple[Rows, ...], tuple[Point, ...]]:
        """See `memory.Memory`. Heads are gathered from every rank. Raises RankLost too."""
        rows, points = self._local.snapshot(seq, since)
        with undivided():
            self._wire.tell(Snapshot(seq, since))
            self._wire.flush()
            return tuple(self._gathered(run) for run in rows), points

    def _gathered(self, run: Rows) -> Rows:
        group, slices, parts = self._wire.group, self._slices, list[torch.Tensor]()
        for spec, mine in zip(parts_of(slices.layout, run.kind), run.parts, strict=True):
            if spec.name in slices.split:
                shapes = {rank: (len(mine), slices.nbytes(spec, rank)) for rank in range(1, slices.size)}
                theirs = [group.take(shape, rank) for rank, shape in shapes.items()]
                mine = torch.cat((mine.cpu(), *theirs), 1)
            parts.append(mine)
        return Rows(run.kind, run.start, run.stop, tuple(parts))

    def restore(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        """See `memory.Memory`. Every rank gets its heads. Raises RankLost too, and then the sequence is not
        empty; but nothing can be done with it any more."""
        kept = tuple(run.kept() for run in rows)
        self._slices.check(kept, points)
        self._local.restore(seq, tokens, self._slices.cut(kept, 0), points)
        self._scatter("restore", seq, tokens, kept, points)

    def replace(
        self, seq: SeqId, tokens: tuple[int, ...], rows: Sequence[Run], points: tuple[Point, ...]
    ) -> None:
        """See `memory.Memory`, and `restore`."""
        kept = tuple(run.kept() for run in rows)
        self._slices.check(kept, points)
        self._local.replace(seq, tokens, self._slices.cut(kept, 0), points)
        self._scatter("replace", seq, tokens, kept, points)

    def _scatter(
        self,
        verb: str,
        seq: SeqId,
        tokens: tuple[int, ...],
        rows: tuple[Rows, ...],
        points: tuple[Point, ...],
    ) -> None:
        """Let the other ranks do the same with their parts."""
        runs = [(run.kind.value, run.start, run.stop) for run in rows]
        ids, at = np.asarray(tokens, np.int64).tobytes(), [point.position for point in points]
        with undivided():
            self._wire.tell(Restore(verb, seq, ids, runs, at))
            self._wire.flush()
            for rank in range(1, self._slices.size):
                mine: tuple[Rows | Point, ...] = (*self._slices.cut(rows, rank), *points)
                for part in (part for one in mine for part in one.parts):
                    self._wire.group.give(part, rank)


class ParallelPlan:
    """See `memory.Plan`. From the moment that a ubatch is applied the other ranks compute it, and wait for
    this one: signals that would end the pass here wait until it is over."""

    def __init__(self, plan: MemoryPlan, wire: Wire, passes: Passes) -> None:
        self._plan = plan
        self._wire = wire
        self._passes = passes
        self._deferral = Deferral()
        self._applied = False

    @property
    def ubatches(self) -> tuple[Ubatch, ...]:
        return self._plan.ubatches

    def apply(self, index: int) -> View:
        self._settle()
        self._deferral.begin()
        self._wire.tell(Apply(index))
        self._wire.flush()
        self._applied = True
        self._passes.begin()
        return self._plan.apply(index)

    def commit(self) -> None:
        try:
            self._settle()
        except BaseException:
            self.rollback()
            raise
        self._plan.commit()
        self._wire.tell(Commit())

    def rollback(self) -> None:
        """See `memory.Plan`. Where a pass broke off in the middle the other ranks are let go, since they wait
        in the middle of theirs: what follows raises RankLost."""
        self._plan.rollback()
        self._wire.tell(Rollback())
        if self._applied and not self._passes.is_over():
            self._wire.group.close("a pass was left in the middle")
        self._applied = False
        self._deferral.end()

    def _settle(self) -> None:
        """The pass before is over. Raises what a signal that came in it raises."""
        if self._applied:
            self._passes.end()
        self._applied = False
        self._deferral.end()


class Passes:
    """Whether a pass got to its end: every pass of a model has as many totals."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._before = 0
        self._each: int | None = None

    def begin(self) -> None:
        self._before = self._group.num_totals

    def end(self) -> None:
        """It is over."""
        self._each = self._group.num_totals - self._before

    def is_over(self) -> bool:
        return self._group.num_totals - self._before == self._each

"""Guesses of the model's own layers that predict further tokens.

Between two questions all depths have rows of the same tokens: those for which the last depth knows all that
it reads. What follows them, and the target's hidden states there, waits: it is computed with the next
question, in the same pass as the guesses are. Rows that were made with a guess, or with the token that is
pending, are removed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from engine.batch import NUM_PLACES, Batch
from engine.cache.memory import Memory, Plan
from engine.cache.table import build_memory
from engine.config import ResolvedConfig
from engine.errors import EngineError, FingerprintMismatch, NoSlot, StateError
from engine.models.mtp import Mtp
from engine.placing import PlacedView, Places
from engine.sampler import sample
from engine.shapes import fixed_shapes
from engine.slots import memory_spec
from engine.speculative.mtp_followed import HIDDEN, Followed, places_of
from engine.state import DraftState, Fingerprint, Layout, PartKind, PartSpec, SamplerParams, SeqId
from engine.tokenizer import Tokenizer

Result = TypeVar("Result")
#: takes what a depth leaves, float32 [rows, width]
After = Callable[[torch.Tensor], None]
#: (depth, what was left before it, tokens, positions) -> what it leaves: `Mtp.step` in one pass
Step = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Tokens that may wait for the next question, beside one a depth: so few cost its pass hardly anything.
WAITING = 32


class MtpDrafter:
    """See `Drafter`. It draws with the target's sampler.

    Where what it should follow begins in the middle, or has mostly been read without it, its rows begin there
    too; such a sequence has no state that could be saved. Its memory has room for what the target has room
    for; where it has none all the same, it forgets sequences, those first that it was asked about least
    recently.
    """

    name = "mtp"
    wants_hidden = True

    def __init__(self, mtp: Mtp, config: ResolvedConfig, target: Fingerprint, tokenizer: Tokenizer) -> None:
        """`config` and `target` are the configuration and fingerprint of the engine that it drafts for."""
        self._mtp = mtp
        self._depths = mtp.num_depths
        self._tokenizer = tokenizer
        self._device = config.device
        waiting, spec = WAITING + self._depths, memory_spec(mtp.needs, config)
        self._stride = NUM_PLACES if config.deterministic else max(config.max_ubatch, waiting)
        self._most_waiting = min(waiting, self._stride)
        cells = spec.num_cells + waiting  # also rows that are removed again
        self._memory: Memory = build_memory(
            replace(spec, num_cells=cells, max_batch=self._stride, max_ubatch=self._stride)
        )
        shape = (self._depths, mtp.width)
        layer = max(part.layer for part in mtp.needs.parts)
        self._place = PartSpec(HIDDEN, PartKind.POINT, layer, "f32", shape)
        self._layout: Layout = (*self._memory.layout, self._place)
        self._followed: OrderedDict[SeqId, Followed] = OrderedDict()
        self.fingerprint: Fingerprint | None = Fingerprint(
            meaning={
                **target.meaning,
                "drafter": self.name,
                "mtp.depths": self._depths,
                "mtp.rotated": " ".join(self._memory.rotated),
            },
            making=target.making,
        )

    # -- what the target tells -----------------------------------------------------------------------

    def observe(self, seq: SeqId, start: int, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.cut(seq, start)
        followed = self._followed.get(seq)
        if hidden is None or (followed is not None and followed.end < start):
            self._forget(seq)
            followed = None
        if hidden is None:
            return
        if followed is None:
            empty = hidden.new_empty((0, self._mtp.width))
            followed = self._followed[seq] = Followed(start, start, [], empty)
        followed.wait(tokens, hidden.to(self._device))
        if len(followed.tokens) > self._most_waiting:
            self._read(seq, followed)

    def cut(self, seq: SeqId, length: int) -> None:
        followed = self._followed.get(seq)
        if followed is not None and length < followed.end:
            self._cut(seq, followed, length)

    def copy(self, source: SeqId, target: SeqId, length: int) -> None:
        self._forget(target)
        followed = self._followed.get(source)
        if followed is None:
            return
        if followed.at > followed.origin:
            self._memory.copy(source, target)
        self._followed[target] = followed.fork()
        self.cut(target, length)

    # -- guesses -------------------------------------------------------------------------------------

    def propose(self, seq: SeqId, tokens: Sequence[int], sampler: SamplerParams, count: int) -> Sequence[int]:
        followed = self._followed.get(seq)
        if followed is None or followed.end + 1 != len(tokens) or not followed.sees_its_end:
            return ()
        self._followed.move_to_end(seq)
        said, line, kept = list(tokens), list(tokens[followed.at :]), followed.at - followed.origin

        def say(left: torch.Tensor) -> None:
            logits = self._mtp.logits(left[-1:])[0, : self._tokenizer.vocab_size]
            said.append(sample(logits, sampler, said, len(said)))
            line.append(said[-1])

        try:
            left = self._depth_by_depth(seq, followed, line, len(followed.tokens), say)
            certain = max(0, len(followed.tokens) - self._depths)
            kept += certain
            followed.go_on(certain)
            while len(said) < len(tokens) + count and said[-1] not in self._tokenizer.end_ids:
                left = self._go_on(seq, followed, said, left)
                say(left)
        except EngineError:  # there is no room, or the logits are no numbers
            if len(said) == len(tokens):
                self._forget(seq)
        finally:
            self._memory.remove(seq, kept, None)
        guesses = said[len(tokens) : len(tokens) + count]
        ends = (at for at, token in enumerate(guesses) if token in self._tokenizer.end_ids)
        return guesses[: next(ends, count) + 1]

    def _depth_by_depth(
        self, seq: SeqId, followed: Followed, line: Sequence[int], count: int, after: After
    ) -> torch.Tensor:
        """Rows of all depths for the first `count` tokens that wait; `line` are these, and those behind them,
        of which there may be one more `after` each depth. What the last one leaves, [count, width]."""

        def compute(step: Step) -> torch.Tensor:
            positions = torch.arange(followed.at, followed.at + count)
            left = followed.hidden[:count]
            for depth in range(self._depths):
                ids = torch.tensor(line[1 + depth : 1 + depth + count])
                left = step(depth, left, ids, positions)
                after(left)
            return left

        return self._pass(seq, followed.at - followed.origin, followed.tokens[:count], compute)

    def _go_on(self, seq: SeqId, followed: Followed, said: Sequence[int], left: torch.Tensor) -> torch.Tensor:
        """The last depth once more, on what it `left` itself and its own guess."""
        position = len(said) - 1 - self._depths

        def compute(step: Step) -> torch.Tensor:
            return step(self._depths - 1, left[-1:], torch.tensor(said[-1:]), torch.tensor([position]))

        return self._pass(seq, position - followed.origin, said[-1:], compute)

    # -- its own sequences -----------------------------------------------------------------------------

    def _read(self, seq: SeqId, followed: Followed) -> None:
        """Make the rows that need no guess. Where there is no room, the sequence is forgotten."""
        try:
            while (ready := len(followed.tokens) - self._depths) > 0:
                count = min(ready, self._stride)
                self._depth_by_depth(seq, followed, followed.tokens, count, _nothing)
                followed.go_on(count)
        except NoSlot:
            self._forget(seq)

    def _pass(
        self, seq: SeqId, start: int, tokens: Sequence[int], compute: Callable[[Step], torch.Tensor]
    ) -> torch.Tensor:
        """One pass over new rows of the sequence's memory, from `start` on. Raises NoSlot."""
        count = len(tokens)
        batch = Batch(
            tokens=np.asarray(tokens, dtype=np.int64),
            positions=np.arange(start, start + count, dtype=np.int64),
            seqs=np.full(count, seq, dtype=np.int64),
            outputs=np.ones(count, dtype=np.bool_),
        )
        plan = self._with_room(seq, lambda: self._memory.plan(batch))
        try:
            with torch.inference_mode():
                result = compute(self._step(plan))
        except BaseException:
            plan.rollback()
            raise
        plan.commit()
        return result

    def _step(self, plan: Plan) -> Step:
        """A plan's only pass."""
        (ubatch,), view = plan.ubatches, plan.apply(0)
        if ubatch.places is None:
            return lambda depth, left, ids, at: self._mtp.step(depth, left, ids, at, view)
        places = Places(ubatch.places)
        placed = PlacedView(view, places)

        def step(depth: int, left: torch.Tensor, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            left, ids, at = (places.spread(x) for x in (left, ids, at))
            with fixed_shapes():
                return places.taken(self._mtp.step(depth, left, ids, at, placed))

        return step

    def _with_room(self, seq: SeqId, verb: Callable[[], Result]) -> Result:
        """`verb`'s result; while it finds no cells, other sequences are forgotten. Raises NoSlot."""
        while True:
            try:
                return verb()
            except NoSlot:
                other = next((one for one in self._followed if one != seq), None)
                if other is None:
                    raise
                self._forget(other)

    def _forget(self, seq: SeqId) -> None:
        self._followed.pop(seq, None)
        self._memory.remove(seq, 0, None)

    def _cut(self, seq: SeqId, followed: Followed, length: int) -> None:
        """As if the target had read no more than `length` tokens."""
        if length <= followed.origin:
            self._forget(seq)
            return
        at = min(followed.at, max(followed.origin, length - self._depths))
        start, stop = at - followed.origin, followed.at - followed.origin
        followed.go_back(at, self._memory.tokens_at(seq, start, stop))
        followed.end_at(length)
        self._memory.remove(seq, start, None)

    # -- states ----------------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, tokens: Sequence[int], since: int = 0) -> DraftState | None:
        followed = self._followed.get(seq)
        if followed is None or followed.origin or followed.end != len(tokens):
            return None
        self._read(seq, followed)
        if seq not in self._followed or not followed.at:
            return None
        followed.keep_place()
        rows, _ = self._memory.snapshot(seq, min(since, followed.at))
        assert self.fingerprint is not None
        return DraftState(
            self.fingerprint, self._layout, followed.at, rows, followed.points(), ahead=self._depths
        )

    def restore(self, seq: SeqId, tokens: Sequence[int], state: DraftState) -> None:
        self._forget(seq)
        assert self.fingerprint is not None
        for name, theirs, mine in state.fingerprint.differing(self.fingerprint):
            raise FingerprintMismatch(
                f"the draft was made with {name} = {theirs}, this drafter has {mine}", field=name
            )
        if state.layout != self._layout:
            raise FingerprintMismatch("the draft's cache layout is another", field="layout")
        if state.ahead != self._depths or state.reach > len(tokens):
            raise StateError(f"the draft is of {state.reach:,} tokens, and there are {len(tokens):,}")
        places = places_of(state, self._place, self._device)
        at, ids = state.length, tuple(tokens[: state.length])
        missing = len(tokens) - state.reach  # read by an engine that did not draft
        if missing > at:
            raise StateError(f"of {len(tokens):,} tokens {missing:,} were read without the drafter")
        self._with_room(seq, lambda: self._memory.restore(seq, ids, state.rows, ()))
        unknown = places[at].new_zeros((missing, self._mtp.width))
        hidden = torch.cat((places[at], unknown))
        self._followed[seq] = Followed(0, at, list(tokens[at:]), hidden, places)


def _nothing(left: torch.Tensor) -> None:
    """After a depth whose guesses are known."""

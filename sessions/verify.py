"""Does what is stored still mean what it says? A session's rows held against its token ids, computed anew.

Digests prove that bytes are those that were written. They do not prove that a kernel, a driver or a codec
still gives the same numbers, nor that it ever gave the right ones. So at sampled lengths the same question
is asked of both: what follows? Once of the stored state of the first n tokens, restored, and once of the
first n tokens read from the start by the model; then their logits are compared. On the way every stored row
that is there is compared with the row that was computed anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.errors import EngineError, NoCheckpoint, UsageError
from engine.state import (
    Layout,
    NextLogits,
    PartKind,
    Pending,
    Provenance,
    Rows,
    SeqId,
    SequenceState,
    parts_of,
)
from engine.verbs import Verbs
from serialization.blobs import Store
from serialization.manifest import Manifest
from serialization.refs import StoredLogits
from serialization.resume import can_resume_at, resumable_lengths
from serialization.snapshot import read_state
from sessions.drift import Drift, drift_of, row_drift
from sessions.reduce import has_rows
from sessions.restore import refuse_other_model

#: Rows that were made in a context which is not there any more: their token ids alone do not give them.
_OF_ANOTHER_PAST = (Provenance.SHIFTED, Provenance.EDITED)


@dataclass(frozen=True, slots=True)
class Sample:
    """After the first `length` tokens: logits of the stored state against logits computed anew. `stored_top`
    and `computed_top` are the likeliest ids of both."""

    length: int
    logits: Drift
    stored_top: int
    computed_top: int

    @property
    def agrees(self) -> bool:
        return self.stored_top == self.computed_top


@dataclass(frozen=True, slots=True)
class PartDrift:
    """All compared rows (or point states) of one part of the layout."""

    name: str
    kind: PartKind
    dtype: str
    num_rows: int
    drift: Drift


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of it. `lengths` were drawn by `seed` from `num_lengths` that could be asked; `recorded`
    compares logits that were stored with the session (all after its last token, or the largest of them) with
    those computed anew. `making` names the fields of the fingerprint in which this engine is another than
    the one that made the rows. `limit` is the largest difference of logits that is no drift.

    `unasked` says what could not be asked, and why.
    """

    session: str
    turn: int
    num_tokens: int
    seed: int
    num_lengths: int
    samples: tuple[Sample, ...]
    recorded: Drift | None
    parts: tuple[PartDrift, ...]
    making: tuple[str, ...]
    limit: float
    unasked: tuple[str, ...]

    @property
    def drifts(self) -> tuple[Drift, ...]:
        found = tuple(sample.logits for sample in self.samples)
        return found if self.recorded is None else (*found, self.recorded)

    @property
    def drifted(self) -> bool:
        return not all(drift.within(self.limit) for drift in self.drifts)

    @property
    def rows(self) -> Drift:
        return sum((part.drift for part in self.parts), Drift())


def verify(
    engine: Verbs, store: Store, manifest: Manifest, count: int, limit: float, seed: int = 0
) -> Verification:
    """Ask at `count` lengths (at all that there are, if they are fewer). The engine needs room for the
    session twice; nothing stays in it, and the store is only read.

    A stored state can be asked only where it can be resumed: for recurrent models at its checkpoints, with
    windows where window rows are kept. Raises UsageError, FingerprintMismatch, NoCheckpoint where there is
    nothing to ask, and what reading and computing raise.
    """
    if count < 1:
        raise UsageError("at least one length must be asked")
    refuse_other_model(engine, manifest)
    if not has_rows(manifest):
        raise NoCheckpoint(f"session {manifest.session} has no stored rows to verify (text and ids alone)")
    stored = replace(manifest, draft=None)
    sound, unasked = _sound(stored)
    population = _askable(engine, stored, sound)
    whole = sound == stored.length <= engine.n_ctx
    if not population and not whole:
        raise NoCheckpoint(f"session {manifest.session} has no length that could be asked", unasked=unasked)
    lengths = sorted(random.Random(seed).sample(population, min(count, len(population))))
    asking = _Asking(engine, store, stored, {spec.name: Drift() for spec in stored.layout})
    samples, recorded = asking.ask(lengths, whole)
    rows = asking.num_rows
    return Verification(
        session=manifest.session,
        turn=manifest.generation,
        num_tokens=manifest.length,
        seed=seed,
        num_lengths=len(population),
        samples=samples,
        recorded=recorded,
        parts=tuple(
            PartDrift(spec.name, spec.kind, spec.dtype, rows[spec.name], asking.drifts[spec.name])
            for spec in stored.layout
        ),
        making=_other_making(engine, manifest),
        limit=limit,
        unasked=unasked,
    )


def _sound(manifest: Manifest) -> tuple[int, tuple[str, ...]]:
    """Up to where rows follow from the token ids alone, and why not further."""
    for span in manifest.spans:
        if span.provenance in _OF_ANOTHER_PAST:
            return span.start, (
                f"rows from token {span.start:,} on are {span.provenance}: they were made in a context that"
                " is gone, and do not follow from the token ids",
            )
    return manifest.length, ()


def _askable(engine: Verbs, manifest: Manifest, sound: int) -> list[int]:
    """Every length that the stored state can be resumed at, and behind which it is known what follows."""
    last = manifest.length if isinstance(manifest.edge, Pending) else manifest.length - 1
    last = min(last, sound, engine.n_ctx - 1)
    return [at for each in resumable_lengths(manifest) for at in each if 1 <= at <= last]


def _other_making(engine: Verbs, manifest: Manifest) -> tuple[str, ...]:
    mine, theirs = engine.fingerprint.making, manifest.fingerprint.making
    return tuple(sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)))


class _Asking:
    """One sequence reads the tokens from the start; beside it the stored state is restored at each length."""

    def __init__(self, engine: Verbs, store: Store, manifest: Manifest, drifts: dict[str, Drift]) -> None:
        self._engine = engine
        self._store = store
        self._manifest = manifest
        self.drifts = drifts
        self.num_rows = dict.fromkeys(drifts, 0)

    def ask(self, lengths: Sequence[int], whole: bool) -> tuple[tuple[Sample, ...], Drift | None]:
        """A sample for each of the rising `lengths`, and the drift of what was recorded after the last token,
        where `whole` says that all tokens may be read."""
        tokens, recorded = self._manifest.length, None
        samples: list[Sample] = []
        fresh = self._engine.create()
        try:
            self._read(fresh, 0, 1)  # alone: the first tokens of several would be shared with a known past
            read, compared = 1, 0
            for length in sorted({*lengths, tokens} if whole else lengths):
                self._read(fresh, read, length)
                if length == tokens and whole:
                    recorded = self._recorded(self._logits(fresh))
                if not can_resume_at(self._manifest, length):
                    continue
                state = read_state(self._store, self._manifest, length)
                self._compare(state, fresh, compared)
                read = compared = length
                if length in lengths:
                    computed = self._follow(fresh, length)
                    samples.append(_sample(length, self._restored(state), computed))
                    read += 1
            return tuple(samples), recorded
        finally:
            self._let_go(fresh)

    def _read(self, seq: SeqId, start: int, stop: int) -> None:
        if start < stop:
            self._engine.feed(seq, self._manifest.tokens[start:stop])

    def _next(self, length: int) -> int:
        """The id behind the first `length` tokens: a length is only asked where there is one."""
        if length < self._manifest.length:
            return self._manifest.tokens[length]
        assert isinstance(self._manifest.edge, Pending)
        return self._manifest.edge.token

    def _follow(self, seq: SeqId, length: int) -> torch.Tensor:
        """One token in both sequences, alone in its batch: rows that are the same then give the same bits."""
        self._engine.feed(seq, (self._next(length),))
        return self._logits(seq)

    def _restored(self, state: SequenceState) -> torch.Tensor:
        seq = self._engine.restore(state)
        try:
            return self._follow(seq, state.length)
        finally:
            self._let_go(seq)

    def _let_go(self, seq: SeqId) -> None:
        """Closed with its rows it would be a past that others are read by, and that past is in question."""
        self._engine.rewind(seq, 0)
        self._engine.close(seq)

    def _logits(self, seq: SeqId) -> torch.Tensor:
        edge = self._engine.edge(seq)
        if not isinstance(edge, NextLogits):
            raise EngineError("a sequence that was fed has no logits")
        return edge.logits

    def _recorded(self, computed: torch.Tensor) -> Drift | None:
        canary = self._manifest.canary
        if isinstance(self._manifest.edge, StoredLogits):
            edge = read_state(self._store, self._manifest).edge
            assert isinstance(edge, NextLogits)
            return drift_of(edge.logits, computed)
        if canary is None or canary.position != self._manifest.length - 1:
            return None
        return drift_of(torch.tensor(canary.logits), computed[list(canary.ids)])

    def _compare(self, state: SequenceState, fresh: SeqId, since: int) -> None:
        """Rows of the tokens from `since` on, and point state where the state ends."""
        anew = self._engine.snapshot(fresh, since)
        for kind in (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW):
            specs = parts_of(state.layout, kind)
            for mine in anew.rows_of(kind):
                for theirs in state.rows_of(kind):
                    start, stop = max(mine.start, theirs.start, since), min(mine.stop, theirs.stop)
                    if start < stop:
                        for index, spec in enumerate(specs):
                            a, b = (_cut(run, specs, index, start, stop) for run in (theirs, mine))
                            self._add(spec.name, len(a), row_drift(spec, a, b))
        specs = parts_of(state.layout, PartKind.POINT)
        for name, a, b in _points(state, anew, specs):
            spec = next(each for each in specs if each.name == name)
            self._add(name, 1, row_drift(spec, a, b))

    def _add(self, name: str, count: int, drift: Drift) -> None:
        self.num_rows[name] += count
        self.drifts[name] += drift


def _sample(length: int, stored: torch.Tensor, computed: torch.Tensor) -> Sample:
    return Sample(length, drift_of(stored, computed), int(stored.argmax()), int(computed.argmax()))


def _cut(run: Rows, specs: Layout, index: int, start: int, stop: int) -> torch.Tensor:
    spec, part = specs[index], run.parts[index]
    return part[spec.num_rows(run.start, start) : spec.num_rows(run.start, stop)]


def _points(
    a: SequenceState, b: SequenceState, specs: Layout
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The point state where both end, by part."""
    last = [{point.position: point for point in each.points}.get(a.length) for each in (a, b)]
    if last[0] is None or last[1] is None:
        return
    for spec, mine, theirs in zip(specs, last[0].parts, last[1].parts, strict=True):
        yield spec.name, mine, theirs

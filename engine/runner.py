"""`Engine`: tokens in, tokens out, for many sequences at once.

A batch goes through in five steps: plan -> for each ubatch apply and forward -> commit -> sample.
Whatever fails before the commit is rolled back, and the sequences are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.admission import check_room, check_state
from engine.cache.memory import Memory
from engine.cache.table import build_memory
from engine.canary import canary_drift
from engine.config import EngineConfig, probe_machine, resolve
from engine.errors import BatchRefused, ContextFull, EditRefused, EngineError
from engine.fingerprint import Source, fingerprint
from engine.models.base import Model
from engine.passes import Work, compute
from engine.reply import Piece, Reply
from engine.sampler import sample
from engine.sequence import Record
from engine.slots import Slots, memory_spec
from engine.state import (
    Canary,
    Edge,
    Fingerprint,
    Layout,
    NextLogits,
    PartKind,
    Pending,
    SamplerParams,
    SeqId,
    SequenceState,
    Span,
    parts_of,
)
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer

Cancel = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class FeedResult:
    """Of the tokens given, `shared` had rows in memory already and `computed` were read."""

    shared: int
    computed: int


class Engine:
    """Sequences are created, fed, sampled from, forked, cut, shifted, snapshotted, restored, closed.

    Not safe from several threads at once. Every verb leaves the other sequences as they are.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        config: EngineConfig,
        source: Source,
    ) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self.template = template
        self.model_name = source.name
        self.config = resolve(config, model.n_ctx_train, probe_machine())
        torch.set_num_threads(self.config.threads)
        self._memory: Memory = build_memory(memory_spec(model.needs, self.config))
        self._has_points = bool(parts_of(self._memory.layout, PartKind.POINT))
        self._slots = Slots(self._memory, self.config.num_seqs)
        self.fingerprint: Fingerprint = fingerprint(
            model, self._memory, self.config, source.weights_digest, tokenizer.digest
        )

    @property
    def layout(self) -> Layout:
        return self._memory.layout

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence may have."""
        return self.config.n_ctx

    # --- sequences ----------------------------------------------------------------------------

    def create(self, sampler: SamplerParams | None = None) -> SeqId:
        """An empty sequence. Raises NoSlot while `num_seqs` are in use."""
        return self._slots.open(sampler or SamplerParams())

    def close(self, seq: SeqId) -> None:
        """Done with the sequence; its rows stay as a known prefix until their room is needed."""
        self._slots.close(seq)

    def tokens(self, seq: SeqId) -> tuple[int, ...]:
        """The fed ids."""
        return tuple(self._slots[seq].tokens)

    def length(self, seq: SeqId) -> int:
        return len(self._slots[seq].tokens)

    def edge(self, seq: SeqId) -> Edge:
        return self._slots[seq].edge

    def spans(self, seq: SeqId) -> tuple[Span, ...]:
        """How the rows came to be, in order, covering all fed tokens."""
        return self._slots[seq].spans

    def logits(self, seq: SeqId) -> torch.Tensor | None:
        """float32 [vocab] after the last fed token; None where it was not computed here."""
        return self._slots[seq].logits

    def sampler(self, seq: SeqId) -> SamplerParams:
        return self._slots[seq].sampler

    def set_sampler(self, seq: SeqId, sampler: SamplerParams) -> None:
        self._slots[seq].sampler = sampler

    def set_pending(self, seq: SeqId, token: int) -> None:
        """Say which token follows the fed ones."""
        self.check_ids((token,))
        self._slots[seq].edge = Pending(token)

    # --- tokens in ----------------------------------------------------------------------------

    def feed(
        self,
        seq: SeqId,
        tokens: Sequence[int],
        *,
        progress: Callable[[int, int], None] | None = None,
        cancel: Cancel | None = None,
    ) -> FeedResult:
        """Append `tokens` after the fed ones; a pending token is dropped (put it first if it belongs).

        An empty sequence first shares the rows of the longest prefix that memory knows, without copying
        any; the last token is always computed. `progress(done, total)` is called after every batch, and
        `cancel` asked before each: what was read by then stays, also after an error; nothing is shared
        where nothing was read. Leaves NextLogits as the edge. Raises ContextFull before any change, NoSlot.
        """
        record, ids = self._slots[seq], list(tokens)
        self.check_ids(ids)
        if not ids:
            return FeedResult(0, 0)
        self.check_room(seq, len(ids))
        before = None if record.tokens else record.fork()
        shared = done = self.share(seq, ids)
        try:
            while done < len(ids) and not (cancel and cancel()):
                part = ids[done : done + self.stride(seq)]
                self.advance({seq: part})
                done += len(part)
                if progress:
                    progress(done, len(ids))
        finally:
            if before is not None and done == shared:
                self._memory.remove(seq, 0, None)
                self._slots.replace(seq, before)
                shared = done = 0
        return FeedResult(shared, done - shared)

    def share(self, seq: SeqId, tokens: Sequence[int]) -> int:
        """Let an empty sequence share the rows of the longest known prefix of `tokens`, all but the last
        of them at most; the one that follows is pending. Returns how many; 0 for one that is not empty."""
        record = self._slots[seq]
        found = None if record.tokens else self._slots.longest(tokens[:-1])
        if found is None:
            return 0
        source, length = found
        self._memory.copy(source, seq, 0, length)
        record.append(tokens[:length])
        record.edge = Pending(tokens[length])
        return length

    def advance(self, work: Mapping[SeqId, Sequence[int]]) -> None:
        """Append tokens to several sequences in one batch, all of them or none; pending tokens are dropped.
        Leaves NextLogits as their edges. Raises ContextFull, NoSlot, BatchRefused before any change."""
        for seq, tokens in work.items():
            self.check_ids(tokens)
            self.check_room(seq, len(tokens))
        for seq, tokens in work.items():
            self._make_room(seq, len(tokens))
        lengths = {seq: (self.length(seq), tokens) for seq, tokens in work.items() if tokens}
        for seq, logits in (self._compute(lengths) if lengths else {}).items():
            record = self._slots[seq]
            due = self._has_points and self._until_checkpoint(seq) <= len(work[seq])
            record.append(work[seq])
            record.follow(logits)
            if due:
                self._memory.mark(seq)

    def known_prefix(self, tokens: Sequence[int]) -> int:
        """How many leading `tokens` a feed to an empty sequence would share."""
        found = self._slots.longest(tokens[:-1])
        return found[1] if found else 0

    # --- tokens out ---------------------------------------------------------------------------

    def decode(self, seqs: Sequence[SeqId]) -> dict[SeqId, int]:
        """One step for all `seqs` in one batch: feed what is pending, sample the next token, leave it
        pending. Raises ContextFull (naming the sequence) before any change, NoSlot."""
        edges = {seq: self.edge(seq) for seq in seqs}
        for seq, edge in edges.items():
            if edge is None:
                raise EngineError(f"sequence {seq} is empty: there is nothing to go on from")
        self.advance({seq: (edge.token,) for seq, edge in edges.items() if isinstance(edge, Pending)})
        return {seq: self.choose(seq) for seq in edges}

    def choose(self, seq: SeqId) -> int:
        """Sample the token that follows, and leave it pending. One that is pending already is the answer.
        Raises EngineError where nothing was fed, or where the logits are not numbers."""
        record = self._slots[seq]
        if record.edge is None:
            raise EngineError(f"sequence {seq} is empty: there is nothing to go on from")
        if isinstance(record.edge, NextLogits):
            # Some models have more rows of output than their tokenizer has tokens.
            logits = record.edge.logits[: self.tokenizer.vocab_size]
            token = sample(logits, record.sampler, record.tokens, len(record.tokens))
            record.edge = Pending(token)
            return token
        return record.edge.token

    def generate(
        self,
        seq: SeqId,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        cancel: Cancel | None = None,
    ) -> Iterator[Piece]:
        """Sample until something ends it; a piece for every token, and the last one says why.

        Text comes in whole characters, and what could still become a stop string is held back. The last
        sampled token stays pending, so that closing the iterator at any time loses nothing.
        """
        reply = Reply(self.tokenizer, tuple(stop), max_tokens)
        while (ended := reply.ended) is None:
            if cancel and cancel():
                ended = "cancelled"
                break
            try:
                token = self.decode([seq])[seq]
            except ContextFull:
                ended = "context"
                break
            yield reply.push(token)
        if reply.unsaid(ended):
            yield reply.end(ended)

    # --- edits --------------------------------------------------------------------------------

    def fork(self, seq: SeqId) -> SeqId:
        """A second sequence with the same past, sharing all rows, and the same sampler."""
        record = self._slots[seq]
        fork = self._slots.open(record.sampler)
        try:
            self._memory.copy(seq, fork)
        except BaseException:
            self._slots.discard(fork)
            raise
        self._slots.replace(fork, record.fork())
        return fork

    def rewind(self, seq: SeqId, length: int) -> None:
        """Cut to the first `length` tokens; the one that followed is pending (`set_pending` says
        otherwise). Raises EditRefused, and nothing changed, where memory could not go on from there."""
        record = self._slots[seq]
        if length == len(record.tokens):
            return
        if not 0 <= length < len(record.tokens):
            raise EditRefused(f"sequence {seq} has {len(record.tokens):,} tokens, and no state at {length:,}")
        self._memory.remove(seq, length, None)
        record.cut(length)

    def can_resume_at(self, seq: SeqId, length: int) -> bool:
        """Whether `rewind` to `length` would be done."""
        return length <= self.length(seq) and self._memory.can_resume_at(seq, length)

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        """The largest length of at most `at_most` that the sequence could be cut to; 0 if no other."""
        return self._memory.last_resumable(seq, min(at_most, self.length(seq)))

    def mark(self, seq: SeqId) -> None:
        """Remember the sequence's point state, if its model has any, so that it can be cut back to here: at
        the borders of turns. Within a long prompt this is done by itself."""
        if self.length(seq):
            self._memory.mark(seq)

    def shift(self, seq: SeqId, n_keep: int, n_discard: int = 0) -> int:
        """Drop tokens after the first `n_keep` and move the rest up. `n_discard` 0 means half of what is
        left; one token at least stays. Returns how many went. Raises EditRefused where memory cannot, and
        NoSlot where rows that are shared find no room to be copied to; then nothing changed."""
        refusal = self._memory.refuse_shift()
        if refusal is not None:
            raise EditRefused(f"{self.model_name} cannot shift its context: {refusal}")
        if n_keep < 0 or n_discard < 0:
            raise EditRefused(f"a shift by {n_discard} after {n_keep}: neither can be negative")
        record = self._slots[seq]
        n_keep = min(n_keep, len(record.tokens))
        left = len(record.tokens) - n_keep
        count = max(0, min(n_discard or left // 2, left - 1))
        if count:
            self._slots.with_room(lambda: self._memory.discard(seq, n_keep, n_keep + count))
            record.drop(n_keep, n_keep + count)
        return count

    # --- states -------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> SequenceState:
        """The complete state, rows from `since` on. Nothing is pending that it would miss."""
        record = self._slots[seq]
        rows, points = self._memory.snapshot(seq, since)
        return SequenceState(
            layout=self.layout,
            fingerprint=self.fingerprint,
            tokens=tuple(record.tokens),
            rows=rows,
            points=points,
            spans=record.spans,
            edge=record.edge,
            sampler=record.sampler,
            canary=record.known_canary(),
        )

    def restore(self, state: SequenceState) -> SeqId:
        """A sequence that goes on where `state` stopped, all or nothing.

        Raises FingerprintMismatch (naming the field), ContextFull, NoSlot, StateError.
        """
        vocab = self._model.vocab_size
        check_state(state, self.fingerprint, self.layout, vocab, self.n_ctx)
        seq = self._slots.open(state.sampler)
        try:
            if state.tokens:
                self._slots.with_room(
                    lambda: self._memory.restore(seq, state.tokens, state.rows, state.points)
                )
        except BaseException:
            self._slots.discard(seq)
            raise
        self._slots.replace(seq, Record.of(state))
        return seq

    def canary_drift(self, seq: SeqId, canary: Canary) -> float:
        """How far `canary` is from what this engine computes. See `engine.canary`."""
        most = self.config.max_batch
        reach = self.config.checkpoint_every + most if self._has_points else 0
        return canary_drift(self._model, self._memory, self._slots, seq, canary, reach, most)

    # --- parts of the verbs -------------------------------------------------------------------

    def _compute(self, work: Work) -> dict[SeqId, torch.Tensor]:
        return compute(self._model, self._memory, self._slots, work)

    def _until_checkpoint(self, seq: SeqId) -> int:
        """Tokens up to the next place for a checkpoint. Places are multiples, the same for all sequences,
        whatever is kept: where checkpoints have to go for others, none is taken again at once."""
        every = self.config.checkpoint_every
        return every - self.length(seq) % every

    def stride(self, seq: SeqId) -> int:
        """How many tokens of a prompt go in at once: a batch, but none that skips a checkpoint."""
        most = self.config.max_batch
        return min(most, self._until_checkpoint(seq)) if self._has_points else most

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raises BatchRefused for an id that the model has no embedding of."""
        vocab = self._model.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            raise BatchRefused(f"a token id is outside of the vocabulary of {vocab:,}")

    def check_room(self, seq: SeqId, count: int) -> None:
        """Raises ContextFull if `count` more tokens can never fit."""
        check_room(self.config, self._memory.refuse_shift(), self.length(seq), count)

    def _make_room(self, seq: SeqId, count: int) -> None:
        """Shift the context, by choice, until `count` more tokens fit."""
        while self.length(seq) + count > self.n_ctx:
            try:
                shifted = self.shift(seq, self.config.n_keep, self.config.n_discard)
            except EditRefused as error:
                raise ContextFull(f"the context of {self.n_ctx:,} tokens is full: {error}") from error
            if not shifted:
                raise ContextFull(f"the context of {self.n_ctx:,} tokens cannot be shifted any further")

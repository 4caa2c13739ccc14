"""`Engine`: tokens in, tokens out, for many sequences at once.

A batch goes through in five steps: plan -> for each ubatch apply and forward -> commit -> sample.
Whatever fails before the commit is rolled back, and the sequences are as they were. What the verbs do is told
in `stepping.py` and `edits.py`; all of them work on one `Core`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from engine.admission import check_ids, check_room, check_state
from engine.cache.memory import Memory, MemorySpec
from engine.cache.table import build_memory
from engine.canary import canary_drift
from engine.chooser import Chooser, Mask
from engine.config import EngineConfig, probe_machine, resolve
from engine.core import Core
from engine.device_state import DeviceState, DeviceStates, device_restore, device_snapshot
from engine.edits import fork, go_back, rewind, shift
from engine.errors import ConfigError
from engine.fingerprint import Source, fingerprint
from engine.generation import Cancel, generate
from engine.models.base import Model, Trunk
from engine.parallel.lead import Lead
from engine.reading import FeedResult, feed, share, unshare
from engine.remembered import MemoryForm, Remembered, memory_form, remembered
from engine.reply import Piece
from engine.sequence import Record
from engine.slots import Resting, Slots, memory_spec
from engine.speculative.base import Drafter
from engine.speculative.speculation import Figures, Speculation, Step
from engine.state import (
    Canary,
    Edge,
    Fingerprint,
    Layout,
    Pending,
    Run,
    SamplerParams,
    SeqId,
    SequenceState,
    Span,
)
from engine.stepping import advance, choose, decode, propose, step
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer


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
        lead: Lead | None = None,
        memory: Callable[[MemorySpec], Memory] = build_memory,
    ) -> None:
        """`lead` has the other ranks of a model that is divided. `memory` builds what a model needs that
        brings its own."""
        self.tokenizer = tokenizer
        self.template = template
        self.model_name = source.name
        self.config = resolve(config, model.n_ctx_train, probe_machine())
        torch.set_num_threads(self.config.threads)
        self._model = model
        self._lead = lead
        spec = memory_spec(model.needs, self.config)
        self._memory: Memory = memory(spec) if lead is None else lead.memory(spec)
        self._slots = Slots(self._memory, self.config.num_seqs, self.unsay)
        self._core = Core(source.name, model, tokenizer, self.config, self._memory, self._slots)
        self._device_states = DeviceStates(self.config.device_state_bytes)
        self.fingerprint: Fingerprint = fingerprint(
            model, self._memory, self.config, source, tokenizer.digest
        )

    def speculate(self, drafter: Drafter, most: int, trunk: Trunk | None = None) -> None:
        """From now on let `drafter` guess up to `most` tokens at a time; what is said stays the same. `trunk`
        is the engine's model, for a drafter that wants its hidden states. Raises ConfigError."""
        if drafter.wants_hidden and trunk is None:
            raise ConfigError(f"{self.model_name} does not show the hidden states that {drafter.name} wants")
        self._core.speculation = Speculation(drafter, most)
        self._core.trunk = trunk if drafter.wants_hidden else None

    @property
    def drafter(self) -> Drafter | None:
        return None if self._core.drafter is None else self._core.drafter.inner

    @property
    def draft_failure(self) -> Exception | None:
        """What the drafter raised, after which it is not asked any more."""
        return None if self._core.drafter is None else self._core.drafter.failure

    @property
    def figures(self) -> Figures | None:
        """What came of all guesses so far; None without a drafter."""
        return None if self._core.speculation is None else self._core.speculation.figures

    @property
    def rank_pids(self) -> dict[int, int]:
        """The process of each other rank, where they were started here."""
        return {} if self._lead is None else self._lead.pids

    def end(self) -> None:
        """Let the processes of other ranks go, if there are any; then nothing can be computed any more. They
        are let go when this process ends, too."""
        if self._lead is not None:
            self._lead.end()

    @property
    def layout(self) -> Layout:
        return self._memory.layout

    def form(self, type_k: str, type_v: str) -> MemoryForm:
        """What its memory would be of with rows of these dtypes. Raises ConfigError for one that they cannot
        be stored as."""
        return memory_form(self._model.needs, self.fingerprint.meaning, type_k, type_v)

    @property
    def remembered(self) -> Remembered:
        """What its memory is made of."""
        return remembered(self._model, self.layout)

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence may have."""
        return self.config.n_ctx

    # --- sequences ----------------------------------------------------------------------------

    def create(self, sampler: SamplerParams | None = None, scope: str = "") -> SeqId:
        """An empty sequence, which shares rows within its `scope` alone. Raises NoSlot while `num_seqs` are
        in use."""
        return self._slots.open(sampler or SamplerParams(), scope)

    def close(self, seq: SeqId) -> None:
        """Done with the sequence; its rows stay as a known prefix until their room is needed."""
        self._slots.close(seq)
        self._device_states.end(seq)

    def rest(self, seq: SeqId) -> Resting:
        """Close the sequence, but so that `wake` finds it as it was, unless its room was needed meanwhile."""
        self._device_states.end(seq)
        return self._slots.rest(seq)

    def wake(self, resting: Resting) -> SeqId | None:
        """The sequence that was put to rest, or None where it is gone. Raises NoSlot."""
        return self._slots.wake(resting)

    def drop(self, resting: Resting) -> None:
        """Forget a sequence that was put to rest, and its rows."""
        self._slots.drop(resting)

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
        return feed(self._core, seq, tokens, progress, cancel)

    def share(self, seq: SeqId, tokens: Sequence[int]) -> int:
        """Let an empty sequence share the rows of the longest known prefix of `tokens`, all but the last
        of them at most; the one that follows is pending. Returns how many; 0 for one that is not empty."""
        return share(self._core, seq, tokens)

    def unshare(self, seq: SeqId, edge: Edge) -> None:
        """Undo a `share` that nothing was read after: the sequence is empty again, and `edge` follows."""
        unshare(self._core, seq, edge)

    def advance(
        self, work: Mapping[SeqId, Sequence[int]], guesses: Mapping[SeqId, Sequence[int]] | None = None
    ) -> dict[SeqId, Step]:
        """Append tokens to several sequences in one batch, all of them or none; pending tokens are dropped.

        Leaves NextLogits as their edges; but where there are `guesses` at what follows (see `propose`),
        tokens are sampled until one is not the guess, and the last is pending: then a step tells of them.
        Raises ContextFull, NoSlot, BatchRefused before any change.
        """
        return advance(self._core, work, guesses or {})

    def known_prefix(self, tokens: Sequence[int], scope: str = "") -> int:
        """How many leading `tokens` a feed to an empty sequence would share."""
        found = self._slots.longest(tokens[:-1], scope)
        return found[1] if found else 0

    # --- tokens out ---------------------------------------------------------------------------

    def decode(self, seqs: Sequence[SeqId]) -> dict[SeqId, int]:
        """One step for all `seqs` in one batch: feed what is pending, sample the next token, leave it
        pending. Raises ContextFull (naming the sequence) before any change, NoSlot; EngineError where there
        is nothing to go on from."""
        return decode(self._core, seqs)

    def choose(self, seq: SeqId, allowed: Mask | None = None) -> int:
        """Sample the token that follows, one of those `allowed`, and leave it pending. One that is pending
        already is the answer. Raises EngineError where nothing was fed, where the logits are not numbers, or
        where no token may follow."""
        return choose(self._core, seq, allowed)

    def propose(self, seq: SeqId, at_most: int | None = None) -> tuple[int, ...]:
        """Guesses at what follows the pending token, so that no more than `at_most` tokens come of them; none
        without a drafter, or where nothing is pending."""
        return propose(self._core, seq, at_most)

    def step(self, seq: SeqId, at_most: int | None = None) -> tuple[int, ...]:
        """One batch for one sequence: feed what is pending, sample what follows, leave the last one pending.
        A drafter's guesses make it several tokens, but no more than `at_most`. Raises as `decode`."""
        return step(self._core, seq, at_most)

    def say(self, seq: SeqId, at_most: int | None = None) -> int:
        """The next token, left pending. A step's other tokens are kept for the next times; whoever does or
        asks anything else of the sequence in between finds it where it was said to, and they are taken back.
        Raises as `decode`."""
        tokens = self._slots.ahead(seq) or step(self._core, seq, at_most)
        self._slots.put_ahead(seq, tokens[1:])
        return tokens[0]

    def unsay(self, seq: SeqId, count: int) -> None:
        """Take back the last `count` of the tokens that were sampled: the one before them is pending."""
        if count:
            go_back(self._core, seq, self.length(seq) - count)

    def generate(
        self,
        seq: SeqId,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        cancel: Cancel | None = None,
        chooser: Chooser | None = None,
    ) -> Iterator[Piece]:
        """Sample until something ends it; a piece for every token, and the last one says why.

        Text comes in whole characters, and what could still become a stop string is held back. The last
        sampled token stays pending, so that closing the iterator at any time loses nothing. A `chooser` is of
        this reply alone.
        """
        return generate(self, seq, max_tokens, stop, cancel, chooser)

    # --- edits --------------------------------------------------------------------------------

    def fork(self, seq: SeqId) -> SeqId:
        """A second sequence with the same past, sharing all rows, and the same sampler."""
        return fork(self._core, seq)

    def rewind(self, seq: SeqId, length: int) -> None:
        """Cut to the first `length` tokens; the one that followed is pending (`set_pending` says
        otherwise). Raises EditRefused, and nothing changed, where memory could not go on from there."""
        rewind(self._core, seq, length)

    def can_resume_at(self, seq: SeqId, length: int) -> bool:
        """Whether `rewind` to `length` would be done."""
        return length <= self.length(seq) and self._memory.can_resume_at(seq, length)

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        """The largest length of at most `at_most` that the sequence could be cut to; 0 if no other."""
        return self._memory.last_resumable(seq, min(at_most, self.length(seq)))

    @property
    def drops_rows(self) -> bool:
        """Whether a sequence may lose rows as it grows, so that it cannot be cut back any more to where it
        stands now: then a copy is the way back. Point state has its checkpoints (see `mark`)."""
        return self._memory.drops_rows()

    def mark(self, seq: SeqId) -> None:
        """Remember the sequence's point state, if its model has any, so that it can be cut back to here: at
        the borders of turns. Within a long prompt this is done by itself."""
        if self.length(seq):
            self._memory.mark(seq)

    def shift(self, seq: SeqId, n_keep: int, n_discard: int = 0) -> int:
        """Drop tokens after the first `n_keep` and move the rest up. `n_discard` 0 means half of what is
        left; one token at least stays. Returns how many went. Raises EditRefused where memory cannot, and
        NoSlot where rows that are shared find no room to be copied to; then nothing changed."""
        return shift(self._core, seq, n_keep, n_discard)

    @property
    def shift_refusal(self) -> str | None:
        """Why no context can be shifted, or None where it can."""
        return self._memory.refuse_shift()

    # --- states -------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> SequenceState:
        """The complete state, rows from `since` on. Nothing is pending that it would miss."""
        record, drafter = self._slots[seq], self._core.drafter
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
            draft=None if drafter is None else drafter.snapshot(seq, record.tokens, since),
        )

    def restore(self, state: SequenceState, runs: Sequence[Run] | None = None, scope: str = "") -> SeqId:
        """A sequence that goes on where `state` stopped, all or nothing: the draft too, unless
        `draft_refusal` says why not. `runs` are its rows where it has none itself, read as they are put in
        place.

        Raises FingerprintMismatch (naming the field), ContextFull, NoSlot, StateError, and what reading
        raises.
        """
        vocab = self._model.vocab_size
        check_state(state, self.fingerprint, self.layout, vocab, self.n_ctx)
        seq, drafter = self._slots.open(state.sampler, scope), self._core.drafter
        try:
            if state.tokens:
                rows = state.rows if runs is None else runs
                self._slots.with_room(lambda: self._memory.restore(seq, state.tokens, rows, state.points))
            if drafter is not None:
                drafter.cut(seq, 0)
                if state.draft is not None and self.draft_refusal(state.draft.fingerprint) is None:
                    drafter.restore(seq, state.tokens, state.draft)
        except BaseException:
            self._slots.discard(seq)
            raise
        self._slots.replace(seq, Record.of(state, scope))
        return seq

    def draft_refusal(self, draft: Fingerprint | None) -> str | None:
        """Why a draft that was made with `draft` (None: there is none) is of no use to this engine; None
        where it will be restored, or where nothing is missed."""
        mine = None if self.drafter is None else self.drafter.fingerprint
        if draft is None:
            return None if mine is None else "the state was saved without a draft"
        if self.drafter is None:
            return "no drafter is in use"
        if mine is None:
            return f"{self.drafter.name} keeps nothing"
        if self.draft_failure is not None:
            return f"{self.drafter.name} failed: {self.draft_failure}"
        for field, theirs, own in draft.differing(mine):
            return f"it was made by another drafter ({field} = {theirs}, here {own})"
        return None

    def device_snapshot(self, seq: SeqId) -> DeviceState:
        """Keep a copy of the whole sequence on its own device, in place of the one before. The handle is good
        until the next copy, until it is freed, or until the sequence is closed. Raises NoSlot where copies
        would take more than `device_state_bytes` in all, and then the one before stays."""
        return device_snapshot(self._core, self._device_states, seq, lambda: self.snapshot(seq))

    def device_restore(self, handle: DeviceState, seq: SeqId | None = None) -> SeqId:
        """Go back to a copy, bit for bit: in a new sequence, or in place of what the live `seq` has. The copy
        stays. Raises HandleRefused, NoSlot, and then nothing changed."""
        return device_restore(self._core, self._device_states, handle, seq)

    def device_free(self, handle: DeviceState) -> None:
        """Give up a copy. Raises HandleRefused."""
        self._device_states.free(handle)

    def canary_drift(self, seq: SeqId, canary: Canary) -> float:
        """How far `canary` is from what this engine computes. See `engine.canary`."""
        most, core = self.config.max_batch, self._core
        reach = self.config.checkpoint_every + most if core.has_points else 0
        return canary_drift(self._model, self._memory, self._slots, seq, canary, reach, most)

    # --- parts of the verbs -------------------------------------------------------------------

    def stride(self, seq: SeqId) -> int:
        """How many tokens of a prompt go in at once: a batch, but none that skips a checkpoint."""
        return self._core.stride(seq)

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raises BatchRefused for an id that the model has no embedding of."""
        check_ids(tokens, self._model.vocab_size)

    def check_room(self, seq: SeqId, count: int) -> None:
        """Raises ContextFull if `count` more tokens can never fit."""
        check_room(self.config, self._memory.refuse_shift(), self.length(seq), count)

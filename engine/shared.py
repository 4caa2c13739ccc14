"""`SharedEngine`: the verbs of an engine for many threads, whose replies share batches."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from engine.chooser import Chooser
from engine.device_state import DeviceState
from engine.driver import Driver
from engine.errors import EngineError
from engine.generation import Cancel
from engine.reading import FeedResult
from engine.remembered import Remembered
from engine.reply import Piece
from engine.runner import Engine
from engine.scheduler import Options, Read
from engine.slots import Resting
from engine.speculative.base import Drafter
from engine.state import Canary, Edge, Fingerprint, Layout, Run, SamplerParams, SeqId, SequenceState, Span
from engine.streams import Items, Stream
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer


class SharedEngine:
    """See `verbs.Verbs`, and `Engine` for what each verb does. Every verb is safe from any thread; a sequence
    is used by one thread at a time.

    Sequences of one `scope` share rows of equal pasts, and those of two never do. While a prompt is read or a
    reply said, others' are in the same batches; one that finds no cells waits while others go on.
    """

    def __init__(self, driver: Driver, scope: str = "") -> None:
        self._driver = driver
        self._engine = driver.engine
        self.scope = scope

    def within(self, scope: str) -> SharedEngine:
        """The same engine, as those of another scope see it."""
        return SharedEngine(self._driver, scope)

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        return self._engine.template

    @property
    def fingerprint(self) -> Fingerprint:
        return self._engine.fingerprint

    @property
    def drafter(self) -> Drafter | None:
        return self._engine.drafter

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    @property
    def remembered(self) -> Remembered:
        return self._engine.remembered

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    @property
    def drops_rows(self) -> bool:
        return self._engine.drops_rows

    # --- sequences ----------------------------------------------------------------------------

    def create(self, sampler: SamplerParams | None = None) -> SeqId:
        return self._driver.call(lambda engine: engine.create(sampler, self.scope))

    def close(self, seq: SeqId) -> None:
        self._driver.let_go(seq, lambda engine: engine.close(seq))

    def rest(self, seq: SeqId) -> Resting:
        return self._driver.let_go(seq, lambda engine: engine.rest(seq))

    def forget(self, seq: SeqId) -> None:
        """Close the sequence and leave none of its rows in memory."""

        def forgotten(engine: Engine) -> None:
            engine.rewind(seq, 0)
            engine.close(seq)

        self._driver.let_go(seq, forgotten)

    def wake(self, resting: Resting) -> SeqId | None:
        return self._driver.call(lambda engine: engine.wake(resting))

    def drop(self, resting: Resting) -> None:
        self._driver.call(lambda engine: engine.drop(resting))

    # What a sequence is between two verbs of its own thread is changed by no other: it is read right here,
    # and no batch is waited for.

    def tokens(self, seq: SeqId) -> tuple[int, ...]:
        return self._engine.tokens(seq)

    def length(self, seq: SeqId) -> int:
        return self._engine.length(seq)

    def edge(self, seq: SeqId) -> Edge:
        return self._engine.edge(seq)

    def spans(self, seq: SeqId) -> tuple[Span, ...]:
        return self._engine.spans(seq)

    def logits(self, seq: SeqId) -> torch.Tensor | None:
        return self._engine.logits(seq)

    def sampler(self, seq: SeqId) -> SamplerParams:
        return self._engine.sampler(seq)

    def set_sampler(self, seq: SeqId, sampler: SamplerParams) -> None:
        self._driver.edit(seq, lambda engine: engine.set_sampler(seq, sampler))

    def set_pending(self, seq: SeqId, token: int) -> None:
        self._driver.edit(seq, lambda engine: engine.set_pending(seq, token))

    # --- tokens in and out --------------------------------------------------------------------

    def feed(
        self,
        seq: SeqId,
        tokens: Sequence[int],
        *,
        progress: Callable[[int, int], None] | None = None,
        cancel: Cancel | None = None,
    ) -> FeedResult:
        """See `Engine.feed`. `progress` is called in this thread, `cancel` is asked in the driver's."""
        if not tokens:
            return FeedResult(0, 0)
        stream = self._driver.feed(seq, tokens, cancel)
        try:
            while True:
                _, item = stream.items.get()
                stream.take(item)
                if not isinstance(item, Read):
                    raise _raised(item)
                done = item.shared + item.computed
                if progress and item.computed:
                    progress(done, len(tokens))
                if not item.left:
                    return FeedResult(item.shared, item.computed)
                self._driver.was_read(stream)
        finally:
            self._leave(stream)

    def known_prefix(self, tokens: Sequence[int]) -> int:
        return self._driver.call(lambda engine: engine.known_prefix(tokens, self.scope))

    def generate(
        self,
        seq: SeqId,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        cancel: Cancel | None = None,
        chooser: Chooser | None = None,
    ) -> Iterator[Piece]:
        """See `Engine.generate`: what was computed ahead of a reader who closes early is taken back."""
        for _, piece in self.replies({seq: Options(max_tokens, tuple(stop), chooser)}, cancel):
            yield piece

    def replies(
        self, asked: Mapping[SeqId, Options], cancel: Cancel | None = None
    ) -> Generator[tuple[int, Piece], None, None]:
        """As `generate`, of several sequences in the same batches: pieces as they come, with the place that
        their sequence has among those asked. An error in one ends all."""
        items: Items = queue.SimpleQueue()
        streams: list[Stream] = []
        try:
            for number, (seq, options) in enumerate(asked.items()):
                streams.append(self._driver.reply(seq, options, cancel, items, number))
            left = len(streams)
            while left:
                number, item = items.get()
                stream = streams[number]
                stream.take(item)
                if not isinstance(item, Piece):
                    raise _raised(item)
                self._driver.was_read(stream)
                left -= item.finish is not None
                yield number, item
        finally:
            for stream in streams:
                self._leave(stream)

    # --- edits --------------------------------------------------------------------------------

    def fork(self, seq: SeqId) -> SeqId:
        return self._driver.call(lambda engine: engine.fork(seq))

    def rewind(self, seq: SeqId, length: int) -> None:
        self._driver.edit(seq, lambda engine: engine.rewind(seq, length))

    def last_resumable(self, seq: SeqId, at_most: int) -> int:
        return self._driver.call(lambda engine: engine.last_resumable(seq, at_most))

    def mark(self, seq: SeqId) -> None:
        self._driver.call(lambda engine: engine.mark(seq))

    # --- states -------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> SequenceState:
        return self._driver.call(lambda engine: engine.snapshot(seq, since))

    def restore(self, state: SequenceState, runs: Sequence[Run] | None = None) -> SeqId:
        """See `Engine.restore`. All is read first, in this thread: others do not wait for a store."""
        rows = state.rows if runs is None else tuple(run.kept() for run in runs)
        whole = replace(state, rows=rows)
        return self._driver.call(lambda engine: engine.restore(whole, scope=self.scope))

    def device_snapshot(self, seq: SeqId) -> DeviceState:
        return self._driver.call(lambda engine: engine.device_snapshot(seq))

    def device_restore(self, handle: DeviceState, seq: SeqId | None = None) -> SeqId:
        return self._driver.call(lambda engine: engine.device_restore(handle, seq))

    def device_free(self, handle: DeviceState) -> None:
        self._driver.call(lambda engine: engine.device_free(handle))

    def draft_refusal(self, draft: Fingerprint | None) -> str | None:
        return self._engine.draft_refusal(draft)

    def canary_drift(self, seq: SeqId, canary: Canary) -> float:
        return self._driver.call(lambda engine: engine.canary_drift(seq, canary))

    def _leave(self, stream: Stream) -> None:
        """Whether it was read to its end, closed early, or broken by an error."""
        if not stream.done:
            self._driver.end(stream)


def _raised(item: object) -> BaseException:
    return item if isinstance(item, BaseException) else EngineError(f"not what was asked for: {item!r}")

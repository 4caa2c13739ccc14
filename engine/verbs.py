"""What sessions ask of an engine: `Engine` does it in the caller's thread, `SharedEngine` for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.chooser import Chooser
from engine.device_state import DeviceState
from engine.generation import Cancel
from engine.reading import FeedResult
from engine.remembered import Remembered
from engine.reply import Piece
from engine.slots import Resting
from engine.speculative.base import Drafter
from engine.state import Canary, Edge, Fingerprint, Run, SamplerParams, SeqId, SequenceState, Span
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer


class Verbs(Protocol):
    """The verbs on sequences, as `Engine` has them; what they raise and leave is told there."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate | None: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def drafter(self) -> Drafter | None: ...

    @property
    def remembered(self) -> Remembered: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def drops_rows(self) -> bool: ...

    # --- sequences ----------------------------------------------------------------------------

    def create(self, sampler: SamplerParams | None = None) -> SeqId: ...

    def close(self, seq: SeqId) -> None: ...

    def rest(self, seq: SeqId) -> Resting: ...

    def wake(self, resting: Resting) -> SeqId | None: ...

    def drop(self, resting: Resting) -> None: ...

    def tokens(self, seq: SeqId) -> tuple[int, ...]: ...

    def length(self, seq: SeqId) -> int: ...

    def edge(self, seq: SeqId) -> Edge: ...

    def spans(self, seq: SeqId) -> tuple[Span, ...]: ...

    def sampler(self, seq: SeqId) -> SamplerParams: ...

    def set_sampler(self, seq: SeqId, sampler: SamplerParams) -> None: ...

    def set_pending(self, seq: SeqId, token: int) -> None: ...

    # --- tokens in and out --------------------------------------------------------------------

    def feed(
        self,
        seq: SeqId,
        tokens: Sequence[int],
        *,
        progress: Callable[[int, int], None] | None = None,
        cancel: Cancel | None = None,
    ) -> FeedResult: ...

    def known_prefix(self, tokens: Sequence[int]) -> int: ...

    def generate(
        self,
        seq: SeqId,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        cancel: Cancel | None = None,
        chooser: Chooser | None = None,
    ) -> Iterator[Piece]: ...

    # --- edits --------------------------------------------------------------------------------

    def fork(self, seq: SeqId) -> SeqId: ...

    def rewind(self, seq: SeqId, length: int) -> None: ...

    def last_resumable(self, seq: SeqId, at_most: int) -> int: ...

    def mark(self, seq: SeqId) -> None: ...

    # --- states -------------------------------------------------------------------------------

    def snapshot(self, seq: SeqId, since: int = 0) -> SequenceState: ...

    def restore(self, state: SequenceState, runs: Sequence[Run] | None = None) -> SeqId: ...

    def draft_refusal(self, draft: Fingerprint | None) -> str | None: ...

    def canary_drift(self, seq: SeqId, canary: Canary) -> float: ...

    def device_snapshot(self, seq: SeqId) -> DeviceState: ...

    def device_restore(self, handle: DeviceState, seq: SeqId | None = None) -> SeqId: ...

    def device_free(self, handle: DeviceState) -> None: ...

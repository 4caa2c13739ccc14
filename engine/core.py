"""What the verbs of an engine work on: the model, what it remembers, and who lives there."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.memory import Memory
from engine.config import ResolvedConfig
from engine.models.base import Model, Trunk
from engine.sequence import Record
from engine.slots import Slots
from engine.speculative.guarded import Guarded
from engine.speculative.speculation import Speculation
from engine.state import PartKind, SeqId, parts_of
from engine.tokenizer import Tokenizer


@dataclass(slots=True)
class Core:
    """`name` is the model's, for people; `trunk` is the model again, where a drafter wants its hidden
    states."""

    name: str
    model: Model
    tokenizer: Tokenizer
    config: ResolvedConfig
    memory: Memory
    slots: Slots
    speculation: Speculation | None = None
    trunk: Trunk | None = None

    @property
    def drafter(self) -> Guarded | None:
        return None if self.speculation is None else self.speculation.drafter

    @property
    def has_points(self) -> bool:
        """Whether the model has state that is true at one position alone."""
        return bool(parts_of(self.memory.layout, PartKind.POINT))

    def record(self, seq: SeqId) -> Record:
        """Raises EngineError for a sequence that is not live."""
        return self.slots[seq]

    def length(self, seq: SeqId) -> int:
        return len(self.slots[seq].tokens)

    def until_checkpoint(self, seq: SeqId) -> int:
        """Tokens up to the next place for a checkpoint. Places are multiples, the same for all sequences,
        whatever is kept: where checkpoints have to go for others, none is taken again at once."""
        every = self.config.checkpoint_every
        return every - self.length(seq) % every

    def passed_checkpoint(self, seq: SeqId, start: int) -> bool:
        """Whether there is a place for a checkpoint behind `start`, up to where the sequence is now."""
        every = self.config.checkpoint_every
        return start // every < self.length(seq) // every

    def stride(self, seq: SeqId) -> int:
        """How many tokens go in at once: a batch, but none that skips a checkpoint."""
        most = self.config.max_batch
        return min(most, self.until_checkpoint(seq)) if self.has_points else most

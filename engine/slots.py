"""Which sequences live in the memory: those in use, and idle ones kept as prefixes until room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakMethod

from engine.cache.memory import Memory, MemoryNeeds, MemorySpec
from engine.config import ResolvedConfig
from engine.errors import EngineError, NoSlot
from engine.sequence import Record
from engine.state import SamplerParams, SeqId

Result = TypeVar("Result")

#: Beyond the sequences in use: one for an idle prefix, or for a moment's scratch work.
SPARE = 1


@dataclass(frozen=True, slots=True, eq=False)
class Resting:
    """Stands for a sequence that was put to rest, and for nothing else: an id is used again, this is not."""

    seq: SeqId
    record: Record


class Slots:
    """Hands out sequence ids. Closing keeps a sequence's rows as an idle prefix; the idle ones least
    recently used give way first."""

    def __init__(self, memory: Memory, num_seqs: int, unsay: Callable[[SeqId, int], None]) -> None:
        """`unsay` takes back so many tokens of a sequence (see `Engine.unsay`). Its owner, who has these
        slots, is not kept alive: its gigabytes are to be free as soon as nobody else has it."""
        self._memory = memory
        self._unsay = WeakMethod(unsay)
        self._num_seqs = num_seqs
        self._live: dict[SeqId, Record] = {}
        self._idle: OrderedDict[SeqId, Record] = OrderedDict()
        self._ahead: dict[SeqId, tuple[int, ...]] = {}

    def __getitem__(self, seq: SeqId) -> Record:
        """What is ahead of its reader is taken back: whoever looks sees what was said, and no more."""
        ahead = self.ahead(seq)
        if ahead:
            unsay = self._unsay()
            assert unsay is not None, "slots are used by their owner alone"
            unsay(seq, len(ahead))
        if seq not in self._live:
            raise EngineError(f"there is no live sequence {seq}")
        return self._live[seq]

    def ahead(self, seq: SeqId) -> tuple[int, ...]:
        """The last tokens of the sequence, as many as were put ahead and not looked past since; they are not
        any more."""
        return self._ahead.pop(seq, ())

    def put_ahead(self, seq: SeqId, tokens: tuple[int, ...]) -> None:
        """Its reader knows nothing yet of its last `tokens`."""
        if tokens:
            self._ahead[seq] = tokens

    def open(self, sampler: SamplerParams, scope: str = "") -> SeqId:
        """An empty sequence. Raises NoSlot while `num_seqs` are live."""
        self._check_live()
        seq = self._vacant()
        self._live[seq] = Record(sampler, scope=scope)
        return seq

    def close(self, seq: SeqId) -> None:
        """Keep its rows as an idle prefix, those ahead of its reader too."""
        self.ahead(seq)
        record = self[seq]
        del self._live[seq]
        if record.tokens:
            self._idle[seq] = record

    def rest(self, seq: SeqId) -> Resting:
        """As `close`, with what wakes the sequence as it was."""
        resting = Resting(seq, self[seq])
        self.close(seq)
        return resting

    def rests(self, resting: Resting) -> bool:
        """Whether the sequence could be woken: it has not given way to others, and rests still."""
        return self._idle.get(resting.seq) is resting.record

    def wake(self, resting: Resting) -> SeqId | None:
        """The sequence in use again, or None where it gave way. Raises NoSlot while `num_seqs` are live."""
        if not self.rests(resting):
            return None
        self._check_live()
        self._live[resting.seq] = self._idle.pop(resting.seq)
        return resting.seq

    def drop(self, resting: Resting) -> None:
        """Forget the sequence and its rows, if it rests still."""
        if self.rests(resting):
            del self._idle[resting.seq]
            self._memory.remove(resting.seq, 0, None)

    def replace(self, seq: SeqId, record: Record) -> None:
        """Put `record` in place of that of a live sequence, whose rows are the record's by now."""
        self._live[seq] = record

    def discard(self, seq: SeqId) -> None:
        """Forget the sequence and its rows."""
        self._live.pop(seq, None)
        self._memory.remove(seq, 0, None)

    def scratch(self) -> SeqId:
        """An empty sequence for a moment's work inside the engine; `discard` ends it."""
        return self._vacant()

    def longest(self, tokens: Sequence[int], scope: str) -> tuple[SeqId, int] | None:
        """The sequence of this scope that shares the most leading tokens, as far as it could go on from
        there. Others are not even compared, so that no time tells of them."""
        best: tuple[SeqId, int] | None = None
        for seq, record in [*self._live.items(), *self._idle.items()]:
            if record.scope != scope:
                continue
            length = self._memory.last_resumable(seq, record.shareable(tokens))
            if length and (best is None or length > best[1]):
                best = seq, length
        if best is not None and best[0] in self._idle:
            self._idle.move_to_end(best[0])
        return best

    def with_room(self, verb: Callable[[], Result]) -> Result:
        """`verb`'s result; while it finds no cells, idle sequences give way. Raises NoSlot."""
        while True:
            try:
                return verb()
            except NoSlot:
                if not self._evict():
                    raise

    def _check_live(self) -> None:
        if len(self._live) >= self._num_seqs:
            raise NoSlot(f"all {self._num_seqs} sequences are in use; close one, or raise num_seqs")

    def _vacant(self) -> SeqId:
        taken = {*self._live, *self._idle}
        for number in range(self._num_seqs + SPARE):
            if number not in taken:
                return SeqId(number)
        if not self._evict():
            raise EngineError("no sequence is vacant, and none is idle")  # SPARE forbids it
        return self._vacant()

    def _evict(self) -> bool:
        if not self._idle:
            return False
        seq, _ = self._idle.popitem(last=False)
        self._memory.remove(seq, 0, None)
        return True


def memory_spec(needs: MemoryNeeds, config: ResolvedConfig) -> MemorySpec:
    """The memory of an engine: what its model needs, for the sequences in use and the spare one."""
    return MemorySpec(
        needs=needs,
        num_cells=config.num_cells,
        num_seqs=config.num_seqs + SPARE,
        max_batch=config.max_batch,
        max_ubatch=config.max_ubatch,
        type_k=config.type_k,
        type_v=config.type_v,
        dtype=config.dtype,
        device=config.device,
        full_windows=config.full_windows,
        keep_tail=config.keep_tail,
        checkpoint_bytes=config.checkpoint_bytes,
        rollback=config.rollback,
        deterministic=config.deterministic,
    )

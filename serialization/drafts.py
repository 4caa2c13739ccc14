"""What a manifest says of a drafter's state (docs/format.md, section 5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import Corrupt
from engine.state import DraftState, Fingerprint, Layout, PartKind, parts_of
from serialization import stated
from serialization.chunks import CHUNK_TOKENS
from serialization.limits import MAX_CHUNKS, MAX_ENTRIES, MAX_TOKENS
from serialization.records import Record
from serialization.refs import BlobRef, Checkpoint, ChunkRef, blob_refs, check_checkpoints, check_chunks

#: the feature that a manifest with a draft needs
DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """Where the rows and point state are that a drafter keeps of a session's first `length` tokens, at least
    one, and what made them. Layout, chunks and checkpoints obey the rules of a manifest's own. What belongs
    to a token may depend on up to `ahead` that follow it, so that all of it is of the first `reach`. Its
    chunks have as many tokens as the manifest's."""

    fingerprint: Fingerprint
    layout: Layout
    length: int
    chunks: tuple[ChunkRef, ...]
    checkpoints: tuple[Checkpoint, ...]
    ahead: int = 0
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def reach(self) -> int:
        return self.length + self.ahead

    def refs(self) -> Iterator[BlobRef]:
        """Every blob named, in the order of the archive; one may come twice."""
        return blob_refs(self.chunks, self.checkpoints, None)

    def is_other(self, draft: DraftState) -> bool:
        """Whether the drafter that `draft` is of would mean something else by the rows."""
        mine, theirs = (self.layout, self.ahead), (draft.layout, draft.ahead)
        return mine != theirs or any(True for _ in self.fingerprint.differing(draft.fingerprint))

    def record(self) -> dict[str, object]:
        return {
            "ahead": self.ahead,
            "checkpoints": [checkpoint.record() for checkpoint in self.checkpoints],
            "chunks": [chunk.record() for chunk in self.chunks],
            "fingerprint": stated.fingerprint_record(self.fingerprint),
            "layout": stated.layout_record(self.layout),
            "length": self.length,
        }

    @classmethod
    def read(cls, record: Record, num_tokens: int, chunk_tokens: int) -> StoredDraft:
        """The draft of a session of `num_tokens`. Raises Corrupt, UnknownFeature or LimitExceeded."""
        draft = cls(
            fingerprint=stated.read_fingerprint(record.record("fingerprint")),
            layout=stated.read_layout(record.value("layout")),
            length=record.integer("length", MAX_TOKENS),
            chunks=tuple(ChunkRef.read(item, chunk_tokens) for item in record.items("chunks", MAX_CHUNKS)),
            checkpoints=tuple(Checkpoint.read(item) for item in record.items("checkpoints", MAX_ENTRIES)),
            ahead=record.integer("ahead", MAX_TOKENS),
            chunk_tokens=chunk_tokens,
        )
        record.end()
        if not 0 < draft.length <= draft.reach <= num_tokens:
            raise Corrupt(f"draft: of {draft.reach:,} tokens in a session of {num_tokens:,}")
        check_chunks(draft.chunks, draft.length, chunk_tokens)
        check_checkpoints(draft.checkpoints, draft.length, bool(parts_of(draft.layout, PartKind.POINT)))
        return draft

"""What a re-encoding would do, as values: told before anything is read, or by who does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from engine.errors import TenutoError
from engine.state import Fingerprint, Layout
from serialization.manifest import Manifest
from serialization.reencode.forms import MemoryForm
from serialization.reencode.outline import Outline
from serialization.reencode.reencoding import Reencoding
from serialization.refs import Stored


class Fate(StrEnum):
    """What becomes of something."""

    KEPT = "kept"  # bit for bit
    CONVERTED = "converted"  # rows of other values, or of another dtype
    DROPPED = "dropped"
    RECOMPUTED = "recomputed"  # not stored: who goes on reads the tokens again
    REFUSED = "refused"  # and so nothing is done


@dataclass(frozen=True, slots=True)
class Item:
    """So many of one kind of thing have one fate, and why. `nbytes` are those of their rows now, `becomes`
    those after, before encoding."""

    fate: Fate
    what: str
    count: int
    why: str
    nbytes: int = 0
    becomes: int = 0


@dataclass(frozen=True, slots=True)
class Conversion:
    """How rows of other dtypes are made: those of `before` read, those of `after` written."""

    before: MemoryForm
    after: MemoryForm


@dataclass(frozen=True, slots=True)
class Plan:
    """`source` is the manifest cut to what is wanted of it. `refusals` are the errors that `reencode` raises,
    the first one first; where there are any, the rest says what could be said nevertheless."""

    source: Manifest
    wanted: Reencoding
    conversion: Conversion | None
    items: tuple[Item, ...]
    refusals: tuple[TenutoError, ...]

    @property
    def layout(self) -> Layout:
        return self.source.layout if self.conversion is None else self.conversion.after.layout

    @property
    def fingerprint(self) -> Fingerprint:
        made = self.source.fingerprint
        return made if self.conversion is None else replace(made, meaning=self.conversion.after.meaning)

    @property
    def chunk_tokens(self) -> int:
        return self.wanted.chunk_tokens or self.source.chunk_tokens

    @property
    def nbytes(self) -> int:
        """Of all rows and point state after, before encoding."""
        return sum(item.becomes for item in self.items)

    def outline(self, stored: Stored) -> Outline:
        """The new chunks of the source, or of its draft."""
        return Outline.of(stored, stored.length, self.chunk_tokens, self.wanted.windows)

    def require(self) -> None:
        """Raises the first refusal, if there is one."""
        for refusal in self.refusals:
            raise refusal

"""What a session says of itself whose rows came from another system (docs/format.md, section 5.8)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.errors import Corrupt, UnknownFeature
from serialization.limits import MAX_LABEL_NBYTES
from serialization.records import Record, real

#: the feature that a manifest of such a session needs
BROUGHT = "brought"


class Proven(StrEnum):
    """How it is known that the rows are the model's."""

    ROWS = "rows"  # the last of them were computed again, and agreed
    REREAD = "reread"  # there are none of another system: all tokens were read anew
    UNVERIFIED = "unverified"  # somebody said so


@dataclass(frozen=True, slots=True)
class Brought:
    """`source` says for people what it was read from. `loss` is the relative error with which its numbers
    could be kept (0.0: all of them), `drift` how far the rows that were computed again were apart at
    most."""

    source: str
    proven: Proven
    loss: float = 0.0
    drift: float | None = None

    def record(self) -> dict[str, object]:
        drift = None if self.drift is None else float(self.drift)
        return {
            "drift": drift,
            "loss": float(self.loss),
            "proven": self.proven.value,
            "source": self.source,
        }

    @staticmethod
    def read(record: Record) -> Brought:
        drift = record.value("drift")
        proven = record.text("proven", MAX_LABEL_NBYTES)
        if proven not in {each.value for each in Proven}:
            raise UnknownFeature(f"brought: proven in an unknown way: {proven[:40]!r}")
        brought = Brought(
            source=record.text("source", MAX_LABEL_NBYTES),
            proven=Proven(proven),
            loss=record.real("loss"),
            drift=None if drift is None else real(drift, "brought: drift"),
        )
        record.end()
        if brought.loss < 0 or (brought.drift is not None and brought.drift < 0):
            raise Corrupt("brought: a loss or a drift below zero")
        if (brought.drift is None) is (brought.proven is Proven.ROWS):
            raise Corrupt("brought: a drift where no rows were compared, or none where they were")
        return brought

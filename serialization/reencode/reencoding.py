"""What a stored state is wanted as: one frozen value, which says nothing of how."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.errors import ConfigError
from engine.state import DTYPES
from serialization.chunks import check_chunk_tokens
from serialization.pipelines import CodecSet, codec_set

#: what rows can be made of: every dtype of values
ROW_DTYPES = tuple(name for name in DTYPES if name != "i64")


class Windows(StrEnum):
    """Which window rows are wanted."""

    NEEDED = "needed"  # those alone that going on at the end needs, and computing the last token anew
    FULL = "full"  # those of every token, or nothing is done: what was dropped is not to be had again


@dataclass(frozen=True, slots=True)
class Reencoding:
    """What is wanted of a stored state; None: as it is stored.

    type_k, type_v: dtypes of rows, as in `EngineConfig`. codec: a named set of pipelines, and `level` how
    hard it searches for repetitions (zstd's 1 to 19; without a codec, of the default one). chunk_tokens:
    tokens of a chunk. cut: of so many tokens, the first ones. windows: which window rows.
    """

    type_k: str | None = None
    type_v: str | None = None
    codec: str | None = None
    level: int | None = None
    chunk_tokens: int | None = None
    cut: int | None = None
    windows: Windows | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be wanted of any state."""
        for name in ("type_k", "type_v"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in ROW_DTYPES:
                raise ConfigError(f"{name} = {dtype!r}: rows can be one of {', '.join(ROW_DTYPES)}")
        if self.chunk_tokens is not None:
            check_chunk_tokens(self.chunk_tokens)
        if self.cut is not None and self.cut < 0:
            raise ConfigError(f"cut = {self.cut}: it cannot be negative")
        self.codecs()

    def codecs(self) -> CodecSet | None:
        """What blobs are to be encoded with; None where they may stay as they are. Raises ConfigError."""
        if self.codec is None and self.level is None:
            return None
        codecs = codec_set(self.codec or "default")
        return codecs if self.level is None else codecs.at_level(self.level)

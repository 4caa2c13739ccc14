"""Which drafter an engine is to have, as one says it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError

NGRAM, MTP = "ngram", "mtp"

#: Guesses at a time, if nothing else is said: n-grams cost nothing, and where they fit they fit for long.
_MOST = {NGRAM: 8}
_MOST_OF_MODELS = 4


@dataclass(frozen=True, slots=True)
class Draft:
    """`source` is "ngram", "mtp", or where a model is; `most` guesses are made at a time (None: as many as
    suit it). Raises ConfigError."""

    source: str
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise ConfigError(f"draft_max = {self.most}: it must be at least 1")

    @property
    def count(self) -> int:
        """Guesses at a time."""
        return self.most or _MOST.get(self.source, _MOST_OF_MODELS)

    def for_target(self, config: EngineConfig) -> EngineConfig:
        """`config`, so that as many tokens can be taken back as may be guessed wrongly."""
        return dataclasses.replace(config, rollback=max(config.rollback, self.count))

    def for_drafter(self, config: EngineConfig, n_ctx: int) -> EngineConfig:
        """That of an engine that drafts for a target of `config`, whose sequences have up to `n_ctx` tokens:
        the same room, never shifted."""
        return dataclasses.replace(config, n_ctx=n_ctx, overflow="stop", n_keep=0, n_discard=0, rollback=0)

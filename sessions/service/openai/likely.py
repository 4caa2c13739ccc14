"""How likely tokens were, in OpenAI's words."""

from __future__ import annotations

import math
from typing import Any

from engine.reply import Piece
from sessions.service.backend import Backend

#: What stands for a token that cannot be, where JSON has no infinity.
_NEVER = -9999.0


class Likely:
    """Of one reply's pieces. The token that ends it is none of its text, and is left out."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def entries(self, piece: Piece) -> list[dict[str, Any]]:
        """One for the piece's token, or none."""
        if piece.token is None or piece.logprobs is None or piece.finish == "eos":
            return []
        top = [self._entry(token, logprob) for token, logprob in piece.logprobs.top]
        return [{**self._entry(piece.token, piece.logprobs.token), "top_logprobs": top}]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._backend.token_bytes(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            "logprob": logprob if math.isfinite(logprob) else _NEVER,
        }

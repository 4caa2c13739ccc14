"""One reply as it grows: tokens to text in whole characters, stop strings, and the end of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.tokenizer import StreamDecoder, Tokenizer

Finish = Literal["eos", "stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How likely the model found a token, before anything that the sampler does to its logits: the natural
    logarithm; and the likeliest in its place with theirs, the best first, as many as were asked for."""

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A sampled token and the text that is certain by it (often none). The last piece has a `finish`;
    it has no token where the reply ended without one (the context was full, or it was cancelled).
    `logprobs` are the token's, where they were asked for."""

    token: int | None
    text: str
    finish: Finish | None = None
    logprobs: Logprobs | None = None


class Reply:
    """Turns sampled tokens into pieces. Text that could still become a stop string waits."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], max_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(text for text in stop if text)
        self._left = max_tokens
        self._held = ""
        self.ended: Finish | None = "length" if max_tokens == 0 else None
        self._said_end = False

    @property
    def left(self) -> int | None:
        """How many tokens the reply may still have; None for any number."""
        return self._left

    def push(self, token: int, logprobs: Logprobs | None = None) -> Piece:
        """The piece of the next token."""
        if self._left is not None:
            self._left -= 1
        if token in self._tokenizer.end_ids:
            self.ended = "eos"
            text = self._rest()
        else:
            text = self._certain(self._decoder.push(token))
            if self.ended is None and self._left == 0:
                self.ended = "length"
                text += self._rest()
        self._said_end = self.ended is not None
        return Piece(token, text, self.ended, logprobs)

    def unsaid(self, ended: Finish | None) -> bool:
        """Whether no piece has told yet that the reply ended."""
        return ended is not None and not self._said_end

    def end(self, ended: Finish | None) -> Piece:
        """The last piece of a reply that ended without a token."""
        self._said_end = True
        return Piece(None, self._rest(), ended)

    def _certain(self, new: str) -> str:
        """The text that no stop string can begin in any more; up to the stop string if there is one."""
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.ended, self._held = "stop", ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _rest(self) -> str:
        """What was held back. A character that never ended is not text; its tokens are kept all the same."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`."""
    for count in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0

"""How long batches take, measured as they go by, and how much of others' prompts a reply can wait for."""

from __future__ import annotations

from engine.scheduler import Counts

#: What a measurement counts for, beside all before it.
_WEIGHT = 0.1


class Pace:
    """Moving means of the seconds that a batch of replies alone takes, and that a token of a prompt adds.

    A batch with prompts in it may take `stretch` times as long as one without, so that is how much longer a
    reply waits for its next token while others are read. `least` tokens are always read, so that prompts end.
    """

    def __init__(self, stretch: float = 2.0, least: int = 8) -> None:
        self._stretch = stretch
        self._least = least
        #: seconds of a batch without prompts, by the token of a reply: a batch of few costs as much as one of
        #: some more, so that they are told apart by powers of two
        self._alone: dict[int, float] = {}
        self._per_prompt_token: float | None = None
        self._per_reply_token: float | None = None
        #: batches since the beginning, and the tokens that were in them
        self.num_batches = 0
        self.num_tokens = 0

    @property
    def prefill_speed(self) -> float | None:
        """Tokens of prompts a second; None before the first."""
        return None if self._per_prompt_token is None else 1 / max(self._per_prompt_token, 1e-9)

    @property
    def decode_speed(self) -> float | None:
        """Tokens of replies a second, of all together; None before the first."""
        return None if self._per_reply_token is None else 1 / max(self._per_reply_token, 1e-9)

    def add(self, counts: Counts, seconds: float) -> None:
        """A batch of `counts` took `seconds`."""
        self.num_batches += 1
        self.num_tokens += counts.prompts + counts.replies
        if counts.replies and not counts.prompts:
            size = counts.replies.bit_length()
            self._alone[size] = _moved(self._alone.get(size), seconds)
            self._per_reply_token = _moved(self._per_reply_token, seconds / counts.replies)
        elif counts.prompts:
            beside = self._alone.get(counts.replies.bit_length(), 0.0) if counts.replies else 0.0
            each = max(seconds - beside, 0.0) / counts.prompts
            self._per_prompt_token = _moved(self._per_prompt_token, each)

    def most(self, replies: int) -> int | None:
        """Tokens of prompts that the next batch may have beside so many replies; None: as many as fit."""
        if not replies:
            return None
        alone = self._alone.get(replies.bit_length())
        if alone is None or not self._per_prompt_token:
            return max(self._least, replies)
        return max(self._least, int((self._stretch - 1) * alone / self._per_prompt_token))


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)

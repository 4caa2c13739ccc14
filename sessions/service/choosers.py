"""How the tokens of a reply are chosen, where an ask says more than its sampler does."""

from __future__ import annotations

import threading

from engine.chooser import Chooser
from engine.errors import UsageError
from engine.grammar.json_object import JsonObject
from engine.grammar.masks import JsonMasks
from engine.tokenizer import Tokenizer
from sessions.service.ask import Ask, Format

#: As many of the likeliest tokens may be told as OpenAI tells.
MAX_LOGPROBS = 20
#: Replies to one prompt.
MAX_REPLIES = 16


class Choosers:
    """Makes them. What JSON may be in this vocabulary is found out once, when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._masks: JsonMasks | None = None

    def check(self, ask: Ask) -> None:
        """Raises UsageError for what no reply can be asked for."""
        if ask.max_tokens is not None and ask.max_tokens < 0:
            raise UsageError(f"max_tokens = {ask.max_tokens} is negative", param="max_tokens")
        if not 1 <= ask.num_replies <= MAX_REPLIES:
            raise UsageError(f"1 to {MAX_REPLIES} replies can be asked for", param="n")
        if ask.logprobs is not None and not 0 <= ask.logprobs <= MAX_LOGPROBS:
            raise UsageError(f"0 to {MAX_LOGPROBS} logprobs can be asked for", param="top_logprobs")

    def of(self, ask: Ask) -> Chooser | None:
        """For one reply."""
        match ask.format:
            case Format.JSON_OBJECT:
                return Chooser(ask.logprobs, JsonObject(self._json()))
            case Format.TEXT:
                return None if ask.logprobs is None else Chooser(ask.logprobs)

    def _json(self) -> JsonMasks:
        with self._lock:
            if self._masks is None:
                self._masks = JsonMasks(self._tokenizer)
            return self._masks

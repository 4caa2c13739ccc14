"""What a reply cost, and how it ended, in the words of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from engine.reply import Finish
from sessions.service.told import Begun, Spoken

Reason = Literal["stop", "length"]


def finish_reason(finish: Finish) -> Reason:
    """A reply that the context or the service's end cut short is one of limited length, too."""
    return "stop" if finish in ("eos", "stop") else "length"


def chat_usage(begun: Begun, replies: tuple[Spoken, ...]) -> dict[str, Any]:
    """`cached_tokens` are those of the prompt that were not read again."""
    said = sum(reply.num_tokens for reply in replies)
    return {
        "prompt_tokens": begun.prompt_tokens,
        "completion_tokens": said,
        "total_tokens": begun.prompt_tokens + said,
        "prompt_tokens_details": {"cached_tokens": begun.restored.restored},
    }

"""What tests of the backend have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from engine.state import SamplerParams
from sessions.service.ask import Ask, ChatMessage
from sessions.service.told import Begun, Ended, Said, Told

SAMPLED = SamplerParams(temperature=1.0, seed=5)
SHORT = Ask(max_tokens=12)
T = "default"


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


def heard(told: Iterator[Told]) -> tuple[Begun, str, Ended]:
    """A whole turn: how it began, what was said, how it ended."""
    begun, *said, ended = told
    assert isinstance(begun, Begun)
    assert isinstance(ended, Ended)
    assert all(isinstance(each, Said) for each in said)
    texts = [each.piece.text for each in said if isinstance(each, Said) and each.reply == 0]
    assert "".join(texts) == ended.replies[0].text
    return begun, ended.replies[0].text, ended


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.01)

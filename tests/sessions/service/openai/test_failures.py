"""What goes wrong while a reply is said, or after it, is told in the words of each API."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import openai
import pytest

from engine.errors import EngineError, StoreFull, TenutoError
from engine.reply import Piece
from sessions.restore import Reason, RestoreResult
from sessions.service.ask import Ask, ChatMessage, Keep, Own
from sessions.service.told import Begun, Ended, Said, Spoken, Told
from tests.sessions.service.fake import FakeBackend
from tests.sessions.service.openai.conftest import House
from tests.sessions.service.serving import served


class Failing(FakeBackend):
    """Says two words, and then `error`; or all, and cannot keep it."""

    error: TenutoError | None = None
    save_error: TenutoError | None = None
    before: TenutoError | None = None

    def complete(
        self,
        tenant: str,
        messages: Sequence[ChatMessage],
        ask: Ask | None = None,
        keep: Keep = Keep.PAST,
        parent: str | None = None,
        own: Own | None = None,
    ) -> Generator[Told, None, None]:
        if self.before is not None:
            raise self.before
        begun = Begun(None, 7, RestoreResult(Reason.NEW, 0, 7, 0.001))
        yield begun
        yield Said(0, Piece(1, "one "))
        if self.error is not None:
            raise self.error
        yield Said(0, Piece(2, "two", "eos"))
        replies = (Spoken("one two", "eos", 2),)
        if own is not None:
            own.note(begun, replies)
        yield Ended(replies, None, None, None, self.save_error)


@pytest.fixture
def backend() -> Failing:
    return Failing()


@pytest.fixture
def house(backend: Failing) -> Iterator[House]:
    with (
        served(backend) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield House(backend, running, api, "default")


def chat(house: House, **more: Any) -> Any:
    return house.chat("Hello.", model="fake", **more)


def respond(house: House, **more: Any) -> Any:
    return house.respond("Hello.", model="fake", **more)


def test_an_error_before_a_reply_is_a_status(house: House, backend: Failing) -> None:
    backend.before = StoreFull("no room")
    for asked in (chat, respond):
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                asked(house, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (507, "store_full")


def test_an_error_in_a_reply_is_a_status_where_it_is_not_streamed(house: House, backend: Failing) -> None:
    backend.error = EngineError("it broke")
    for asked in (chat, respond):
        with pytest.raises(openai.InternalServerError) as caught:
            asked(house)
        assert caught.value.code == "engine_error"


def test_an_error_in_a_streamed_chat_is_raised_by_the_client(house: House, backend: Failing) -> None:
    backend.error = EngineError("it broke")
    stream = chat(house, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "one "]
    with pytest.raises(openai.APIError, match="it broke"):
        next(stream)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    lines = house.post("/v1/chat/completions", body).text.strip().splitlines()
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_error"


def test_an_error_in_a_streamed_response_is_its_last_event(house: House, backend: Failing) -> None:
    backend.error = EngineError("it broke")
    *_, last = respond(house, stream=True)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.message == "engine_error: it broke"


def test_a_response_that_cannot_be_kept_says_so(house: House, backend: Failing) -> None:
    backend.save_error = StoreFull("no room")
    reply = respond(house)
    assert (reply.output_text, reply.status, reply.store) == ("one two", "completed", False)
    *_, last = respond(house, stream=True)
    assert (last.type, last.response.store) == ("response.completed", False)
    backend.save_error = None
    assert respond(house).store is True
    assert respond(house, store=False).store is False


def test_a_chat_that_cannot_be_kept_is_said(house: House, backend: Failing) -> None:
    backend.save_error = StoreFull("no room")
    assert chat(house).choices[0].message.content == "one two"

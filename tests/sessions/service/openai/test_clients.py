"""How OpenAI's clients behave towards the service, of both kinds: they come again when they are told to, and
not when it is of no use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import openai
import pytest

from engine.errors import Busy, Draining, EngineError, LeaseHeld, TenutoError, UsageError
from sessions.service.ask import Ask, ChatMessage, Keep, Own
from sessions.service.config import ServiceConfig
from sessions.service.told import Told
from tests.sessions.service.openai.conftest import MODEL, House, assistant, cached, user
from tests.sessions.service.openai.test_failures import Failing
from tests.sessions.service.serving import Served, served


class Reluctant(Failing):
    """Refuses as many calls as it has `refusals`, one after the other, before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[TenutoError] = []
        self.calls = 0

    def complete(
        self,
        tenant: str,
        messages: Sequence[ChatMessage],
        ask: Ask | None = None,
        keep: Keep = Keep.PAST,
        parent: str | None = None,
        own: Own | None = None,
    ) -> Generator[Told, None, None]:
        self.calls += 1
        self.before = self.refusals.pop(0) if self.refusals else None
        return super().complete(tenant, messages, ask, keep, parent, own)


@pytest.fixture
def backend() -> Reluctant:
    return Reluctant()


@pytest.fixture
def at(backend: Reluctant) -> Iterator[Served]:
    with served(backend) as running:
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long clients waited before they came again; they do not really, and nobody else is hurried."""
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(
        openai._base_client, "time", SimpleNamespace(**{**vars(time), "sleep": waited.append})
    )
    monkeypatch.setattr(openai._base_client, "anyio", SimpleNamespace(**{**vars(anyio), "sleep": wait}))
    return waited


def ask(at: Served, kind: str, stream: bool, retries: int = 2) -> str:
    """The reply to a word, by a client of this kind."""
    body: dict[str, Any] = {"model": "fake", "messages": [user("Hello.")], "stream": stream}
    settings: dict[str, Any] = {"base_url": f"{at.url}/v1", "api_key": "none", "max_retries": retries}

    async def asked() -> str:
        async with openai.AsyncOpenAI(**settings) as api:
            reply = await api.chat.completions.create(**body)
            if not stream:
                return str(reply.choices[0].message.content)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])

    if kind == "async":
        return asyncio.run(asked())
    with openai.OpenAI(**settings) as api:
        reply: Any = api.chat.completions.create(**body)
        if not stream:
            return str(reply.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in reply)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_comes_again_after_as_long_as_it_was_told_to_wait(
    at: Served, backend: Reluctant, waits: list[float], kind: str, stream: bool
) -> None:
    backend.refusals = [Busy("as many as may wait do", retry_after=7), Draining("it ends")]
    assert ask(at, kind, stream) == "one two"
    assert (backend.calls, len(waits)) == (3, 2)
    assert waits[0] == 7


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (Busy("no", retry_after=3), openai.RateLimitError, 429),
        (Draining("no"), openai.InternalServerError, 503),
        (EngineError("no"), openai.InternalServerError, 500),
    ],
)
def test_it_gives_up_with_an_error_of_its_own(
    at: Served,
    backend: Reluctant,
    waits: list[float],
    kind: str,
    error: TenutoError,
    expected: type[openai.APIStatusError],
    status: int,
) -> None:
    backend.refusals = [error] * 10
    with pytest.raises(expected) as caught:
        ask(at, kind, False)
    assert (caught.value.status_code, backend.calls, len(waits)) == (status, 3, 2)
    assert caught.value.request_id


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    "error", [UsageError("no"), LeaseHeld("no", holder="another", until=1.0, fence=1)], ids=["400", "423"]
)
def test_what_would_be_refused_again_is_not_asked_again(
    at: Served, backend: Reluctant, waits: list[float], kind: str, error: TenutoError
) -> None:
    backend.refusals = [error]
    with pytest.raises(openai.APIStatusError):
        ask(at, kind, False)
    assert (backend.calls, waits) == (1, [])


def test_a_rate_says_how_long_to_wait_and_the_client_does(backend: Reluctant, waits: list[float]) -> None:
    with served(backend, ServiceConfig(requests_per_minute=2)) as at:
        assert ask(at, "sync", False)
        assert ask(at, "sync", False)
        with pytest.raises(openai.RateLimitError):
            ask(at, "sync", False)
    assert len(waits) == 2
    assert all(20 < seconds <= 30 for seconds in waits)


# --- a real model -----------------------------------------------------------------------------------------


def test_the_raw_response_has_the_headers_and_the_reply(house: House) -> None:
    messages = [user("Good morning.")]
    known = {"model": MODEL, "max_tokens": 8, "seed": 1}
    first = house.api.chat.completions.with_raw_response.create(messages=messages, **known)
    assert first.headers["x-tenuto-reason"] == "new"
    assert first.headers["x-request-id"] == first.request_id
    messages += [assistant(first.parse().choices[0].message.content), user("And?")]
    later = house.api.chat.completions.with_raw_response.create(messages=messages, **known)
    reply = later.parse()
    assert int(later.headers["x-tenuto-restored-tokens"]) == cached(reply) > 0
    response = house.api.responses.with_raw_response.create(model=MODEL, input="Hello.", max_output_tokens=16)
    assert int(response.headers["x-tenuto-restored-tokens"]) == cached(response.parse())
    with house.api.chat.completions.with_streaming_response.create(
        messages=messages, stream=True, **known
    ) as answer:
        assert int(answer.headers["x-tenuto-restored-tokens"]) > 0
        assert list(answer.iter_lines())[-2] == "data: [DONE]"


def test_a_client_in_an_event_loop_hears_what_one_in_a_thread_hears(house: House) -> None:
    """All that may be asked for, whole and as streams."""
    asks: list[dict[str, Any]] = [
        {"max_tokens": 8},
        {"max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"max_tokens": 24, "stop": ["a", "e"]},
        {"max_tokens": 40, "response_format": {"type": "json_object"}},
    ]
    known: dict[str, Any] = {"model": MODEL, "messages": [user("Good morning.")], "seed": 3}
    thread = [house.api.chat.completions.create(**known, **more) for more in asks]

    async def one(api: openai.AsyncOpenAI, more: dict[str, Any]) -> tuple[Any, Any]:
        whole: Any = await api.chat.completions.create(**known, **more)
        options = {"include_usage": True}
        stream: Any = await api.chat.completions.create(**known, **more, stream=True, stream_options=options)
        return whole, [chunk async for chunk in stream]

    async def all_at_once() -> list[tuple[Any, Any]]:
        settings: dict[str, Any] = {"base_url": f"{house.served.url}/v1", "api_key": house.tenant}
        async with openai.AsyncOpenAI(**settings, max_retries=0, timeout=120) as api:
            (model,) = [model async for model in api.models.list()]
            assert model.id == MODEL
            return list(await asyncio.gather(*(one(api, more) for more in asks)))

    for expected, (whole, chunks) in zip(thread, asyncio.run(all_at_once()), strict=True):
        assert [(c.message.content, c.finish_reason) for c in whole.choices] == [
            (c.message.content, c.finish_reason) for c in expected.choices
        ]
        for choice in expected.choices:
            parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert "".join(part.delta.content or "" for part in parts) == choice.message.content
            told = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
            assert [entry.token for entry in told] == [
                entry.token for entry in (choice.logprobs.content if choice.logprobs else [])
            ]
        assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                    }
                ]
            },
            "messages[0].content[0].type",
        ),
    ],
    ids=["tools", "image"],
)
def test_a_client_in_an_event_loop_is_refused_by_name(house: House, more: dict[str, Any], param: str) -> None:
    async def asked() -> None:
        settings: dict[str, Any] = {"base_url": f"{house.served.url}/v1", "api_key": house.tenant}
        async with openai.AsyncOpenAI(**settings) as api:
            known: dict[str, Any] = {"model": MODEL, "messages": [user("Hello.")], **more}
            await api.chat.completions.create(**known)

    with pytest.raises(openai.BadRequestError) as caught:
        asyncio.run(asked())
    assert (caught.value.code, caught.value.param) == ("unsupported", param)

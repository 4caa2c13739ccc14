"""Chat completions by OpenAI's own client: the past is never read twice, and streams say the same."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sessions.service.ask import ChatMessage
from tests.sessions.service.openai.chatting import END, TALK, B, choices, joined, said, salted, streamed, talk
from tests.sessions.service.openai.conftest import LETTERS, MODEL, House, Up, assistant, cached, user

# --- what is told ---------------------------------------------------------------------------------------


def test_a_reply_has_the_shape_that_clients_know(house: House) -> None:
    reply = house.chat("Good morning.")
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.model) == ("chat.completion", MODEL)
    assert abs(reply.created - time.time()) < 60
    assert reply.system_fingerprint.startswith("fp_")
    (choice,) = reply.choices
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.logprobs is None
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
    assert reply.usage.prompt_tokens == house.backend.count([ChatMessage("user", "Good morning.")])


def test_the_past_is_read_once_and_each_reply_says_so(house: House) -> None:
    first, *later = talk(house)
    assert cached(first) == 0
    before = first
    for reply in later:
        # All but the last token that was said, which nothing was computed from yet.
        assert cached(reply) == before.usage.total_tokens - 1
        before = reply


def test_headers_say_what_was_restored_and_why(house: House) -> None:
    messages, answers = [user("Good morning.")], []
    for _ in range(2):
        body = {"model": MODEL, "messages": messages, "max_tokens": 5, "seed": 3}
        answers.append(house.post("/v1/chat/completions", body))
        messages += [assistant(answers[-1].json()["choices"][0]["message"]["content"]), user("And?")]
    fresh, later = (answer.headers for answer in answers)
    usage = answers[1].json()["usage"]
    assert (fresh["x-tenuto-restored-tokens"], fresh["x-tenuto-reason"]) == ("0", "new")
    assert int(later["x-tenuto-restored-tokens"]) == usage["prompt_tokens_details"]["cached_tokens"] > 0
    both = int(later["x-tenuto-restored-tokens"]) + int(later["x-tenuto-recomputed-tokens"])
    assert both == usage["prompt_tokens"]
    assert later["x-tenuto-reason"] == "exact"


def test_a_restart_between_turns_changes_nothing_but_the_time(up: Up) -> None:
    with up() as house:
        unbroken = talk(house, **salted("unbroken"))
    messages, broken = [], []
    for text in TALK:
        with up() as house:
            messages.append(user(text))
            broken.append(house.chat(messages, **salted("broken")))
            messages.append(assistant(said(broken[-1])))
    assert [said(reply) for reply in broken] == [said(reply) for reply in unbroken]
    assert [cached(reply) for reply in broken] == [cached(reply) for reply in unbroken]


def test_another_end_of_the_same_past_shares_what_is_the_same(house: House) -> None:
    first = house.chat("Good morning.", **LETTERS)
    messages = [user("Good morning."), assistant(said(first))]
    both = [house.chat([*messages, user(text)], seed=5) for text in ("Why?", "Really, why?")]
    for reply in both:
        assert cached(reply) >= first.usage.total_tokens - 1
    fresh = house.chat([*messages, user("Really, why?")], seed=5, **salted("another"))
    assert (said(fresh), cached(fresh)) == (said(both[1]), 0)


# --- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 3}, {"stop": ["a", "e"]}])
def test_a_stream_says_what_a_whole_reply_says(house: House, more: dict[str, Any]) -> None:
    whole = house.chat("Good morning.", max_tokens=24, **more, **salted("whole"))
    options = {"include_usage": True}
    chunks = streamed(
        house, "Good morning.", max_tokens=24, **more, **salted("stream"), stream_options=options
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        parts = choices(chunks, choice.index)
        assert parts[0].delta.role == "assistant"
        assert joined(chunks, choice.index) == choice.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        told = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert told == (choice.logprobs.content if choice.logprobs else [])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_tells_no_usage_that_is_not_asked_for(house: House) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in streamed(house, "Good morning."))


def test_a_stream_ends_as_clients_expect(house: House) -> None:
    body = {"messages": [user("Hello.")], "max_tokens": 3, "stream": True}
    answer = house.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_stream_helper_of_the_client_understands_it(house: House) -> None:
    more = {"max_tokens": 40, "seed": 1, "logit_bias": {str(B): 6}, "stop": "B"}
    asked = {"model": MODEL, "messages": [user("Good morning.")], **more}
    with house.api.chat.completions.stream(**asked) as stream:
        whole = stream.get_final_completion()
    assert said(whole) == said(house.chat("Good morning.", **more))


def test_who_goes_away_ends_the_reply(house: House) -> None:
    stream = house.chat("Good morning.", max_tokens=900, stream=True, logit_bias={str(END): -100})
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 20
    while house.backend.load().running and time.monotonic() < until:
        time.sleep(0.01)
    assert house.backend.load().running == 0


# --- keeping ------------------------------------------------------------------------------------------------


def test_a_salt_shares_with_the_same_salt_alone(house: House) -> None:
    messages = [user("Good morning, " + "all of you, " * 20)]
    assert [cached(house.chat(messages, **salted(salt))) for salt in ("a", "b", "a")][:2] == [0, 0]
    later = [cached(house.chat(messages, **salted(salt))) for salt in ("a", "b", "c")]
    assert later[0] > 100
    assert later[1] > 100
    assert later[2] == 0
    assert cached(house.chat(messages)) == 0


def test_what_is_not_to_be_kept_is_nowhere(house: House) -> None:
    before = house.backend.usage(house.tenant).total
    messages = [user("Good morning, " + "all of you, " * 20)]
    reply = house.chat(messages, store=False)
    assert house.backend.usage(house.tenant).total == before
    assert house.backend.list(house.tenant).sessions == ()
    later = house.chat([*messages, assistant(said(reply)), user("And?")], store=False)
    assert cached(later) == 0
    assert house.backend.usage(house.tenant).total == before


# --- together -----------------------------------------------------------------------------------------------


def test_clients_at_once_each_have_their_own_conversation(up: Up) -> None:
    """Eight conversations of three turns at once say what each says alone."""
    names = [f"client {number}" for number in range(8)]

    def turns(name: str) -> tuple[str, ...]:
        return (f"I am {name}. " + "Listen. " * 5, f"What is the name of {name}?", "And mine?")

    with up() as house:
        alone = {name: talk(house, turns(name), **salted("alone")) for name in names[:3]}
        with ThreadPoolExecutor(len(names)) as pool:
            together = dict(
                zip(
                    names,
                    pool.map(lambda name: talk(house, turns(name), **salted("together")), names),
                    strict=True,
                )
            )
    for name, replies in alone.items():
        assert [said(reply) for reply in together[name]] == [said(reply) for reply in replies]
    for replies in together.values():
        for before, reply in itertools.pairwise(replies):
            assert cached(reply) == before.usage.total_tokens - 1

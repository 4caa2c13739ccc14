"""Chat completions by OpenAI's own client: each knob does what it says."""

from __future__ import annotations

import json
from typing import Any

from tests.sessions.service.openai.chatting import END, A, B, joined, refused, said, salted, streamed
from tests.sessions.service.openai.conftest import LETTERS, House


def test_several_choices_are_of_seeds_of_their_own_and_the_first_is_the_only_ones(house: House) -> None:
    one = house.chat("Good morning.", **salted("one"))
    four = house.chat("Good morning.", n=4, **salted("four"))
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert four.choices[0].message.content == said(one)
    assert len({choice.message.content for choice in four.choices}) == 4
    assert four.usage.prompt_tokens == one.usage.prompt_tokens
    assert four.usage.completion_tokens == sum([12] * 4)
    greedy = house.chat("Good morning.", n=3, temperature=0)
    assert len({choice.message.content for choice in greedy.choices}) == 1


def test_a_stop_text_ends_a_reply_and_is_no_part_of_it(house: House) -> None:
    whole = said(house.chat("Good morning.", max_tokens=40, logit_bias={str(B): 6, str(A): 6}))
    assert "B" in whole
    assert "A" in whole
    for stop in ("B", ["B"], ["B", "never said"]):
        reply = house.chat("Good morning.", max_tokens=40, logit_bias={str(B): 6, str(A): 6}, stop=stop)
        assert said(reply) == whole.partition("B")[0]
        assert reply.choices[0].finish_reason == "stop"


def test_a_reply_that_the_model_ends_says_so(house: House) -> None:
    reply = house.chat("Good morning.", logit_bias={str(END): 100})
    assert (said(reply), reply.choices[0].finish_reason) == ("", "stop")
    assert reply.usage.completion_tokens == 1


def test_the_same_seed_says_the_same_and_no_seed_never_does(house: House) -> None:
    def reply(**more: Any) -> str:
        return said(house.chat("Good morning.", max_tokens=20, **more))

    assert reply(seed=7) == reply(seed=7) != reply(seed=8)
    assert reply(seed=-7) == reply(seed=-7) != reply(seed=7)
    assert reply(seed=None) != reply(seed=None)


def test_temperature_and_top_p_narrow_the_choice(house: House) -> None:
    greedy = said(house.chat("Good morning.", temperature=0))
    assert said(house.chat("Good morning.", top_p=0)) == greedy
    assert said(house.chat("Good morning.", temperature=0.0001, seed=4)) == greedy
    assert said(house.chat("Good morning.", extra_body={"top_k": 1})) == greedy
    assert said(house.chat("Good morning.", extra_body={"min_p": 1})) == greedy
    assert said(house.chat("Good morning.")) != greedy


def test_penalties_and_biases_count(house: House) -> None:
    assert said(house.chat("Hm.", temperature=0, logit_bias={str(A): 100})) == "A" * 12
    assert said(house.chat("Hm.", temperature=0, logit_bias={str(A): 100}, presence_penalty=2)) == "A" * 12
    letters = {"temperature": 0, "max_tokens": 30, **LETTERS}
    few = len(set(said(house.chat("Hm.", **letters))))
    for name in ("frequency_penalty", "presence_penalty"):
        assert len(set(said(house.chat("Hm.", **letters, **{name: 2})))) > few
        assert len(set(said(house.chat("Hm.", **letters, **{name: -2})))) <= few
        assert refused(house, **{name: 3}).param == name


def test_a_reply_has_no_more_tokens_than_may_be_by_either_name(house: House) -> None:
    for more in ({"max_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": None}):
        assert house.chat("Hello.", **more).usage.completion_tokens == 5
    assert refused(house, max_completion_tokens=5, max_tokens=6).param == "max_tokens"


def test_logprobs_are_of_every_token_and_the_likeliest_in_its_place(house: House) -> None:
    reply = house.chat("Good morning.", temperature=0, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    assert len(entries) == 12
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert data.decode("utf-8", "replace").startswith(said(reply))
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert entry.top_logprobs[0].bytes == entry.bytes
    bare = house.chat("Good morning.", temperature=0, logprobs=True)
    assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content)
    assert said(bare) == said(reply) == said(house.chat("Good morning.", temperature=0))
    assert refused(house, top_logprobs=3).param == "top_logprobs"


def test_the_token_that_ends_a_reply_has_no_logprobs(house: House) -> None:
    reply = house.chat("Hello.", logit_bias={str(END): 100}, logprobs=True)
    assert reply.choices[0].logprobs.content == []


def test_an_object_is_asked_for_and_an_object_it_is(house: House) -> None:
    closing = {str(ord(text)): 6 for text in '}"]'}
    for seed in (2, 3):
        whole = house.chat(
            "Say it in JSON.",
            max_tokens=300,
            seed=seed,
            logit_bias=closing,
            response_format={"type": "json_object"},
        )
        assert whole.choices[0].finish_reason == "stop"
        assert isinstance(json.loads(said(whole)), dict)
    chunks = streamed(
        house,
        "Say it in JSON.",
        max_tokens=300,
        seed=3,
        logit_bias=closing,
        response_format={"type": "json_object"},
    )
    assert joined(chunks) == said(whole)
    assert said(house.chat("Hello.", response_format={"type": "text"})) == said(house.chat("Hello."))

"""Responses as events, by OpenAI's own client."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.sessions.service.openai.chatting import END
from tests.sessions.service.openai.conftest import MODEL, House


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}])
def test_a_stream_tells_of_a_response_in_the_order_that_clients_expect(
    house: House, more: dict[str, Any]
) -> None:
    whole = house.respond("Good morning.", instructions="Be brief.", **more)
    events = list(house.respond("Good morning.", instructions="Be brief.", stream=True, **more))
    names = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response
    text = "".join(event.delta for event in deltas)
    assert text == response.output_text == whole.output_text == events[-4].text
    assert {event.item_id for event in deltas} == {response.output[0].id}
    assert events[-2].item == response.output[0]
    assert [response.output[0].content[0].logprobs] == [whole.output[0].content[0].logprobs]
    assert events[0].response.id == response.id
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    kept = house.api.responses.retrieve(response.id)
    assert kept.output_text == response.output_text
    assert kept.usage == response.usage


def test_a_stream_that_the_model_ends_is_completed(house: House) -> None:
    events = list(house.respond("Hello.", stream=True, extra_body={"logit_bias": {str(END): 100}}))
    assert events[-1].type == "response.completed"
    assert events[-1].response.status == "completed"


def test_the_stream_helper_of_the_client_understands_it(house: House) -> None:
    with house.api.responses.stream(model=MODEL, input="Hello.", max_output_tokens=5) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert house.ask("GET", "/v1/models").status_code == 200
    assert len(text) > 0


def test_who_goes_away_ends_the_reply(house: House) -> None:
    stream = house.respond(
        "Good morning.", max_output_tokens=900, stream=True, extra_body={"logit_bias": {str(END): -100}}
    )
    created = next(iter(stream))
    stream.close()
    until = time.monotonic() + 20
    while house.backend.load().running and time.monotonic() < until:
        time.sleep(0.01)
    kept = house.api.responses.retrieve(created.response.id)
    assert kept.status == "cancelled"
    assert kept.usage.output_tokens < 900

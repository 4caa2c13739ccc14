"""Bodies of responses: fields that change nothing, and what is refused."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.sessions.service.openai.conftest import House

MISSING = "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV"


def refused(house: House, **more: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        house.respond(more.pop("given", "Hello."), **more)
    return caught.value


_TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": True}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [_TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"given": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].type"),
        ({"given": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].type"),
        (
            {"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(house: House, more: dict[str, Any], param: str) -> None:
    error = refused(house, **more)
    assert (error.code, error.param) == ("unsupported", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "temperature": "hot"}, "temperature"),
        ({"input": "a", "include": ["everything"]}, "include[0]"),
        ({"input": "a", "metadata": {"k" * 65: "v"}}, "metadata"),
        ({"input": "a", "metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"input": "a", "metadata": {str(at): "" for at in range(17)}}, "metadata"),
        ({"input": "a", "conversation": 3}, "conversation"),
        ({"input": "a", "previous_response_id": 3}, "previous_response_id"),
        ({"input": "a", "previous_response_id": MISSING, "conversation": "conv_x"}, "previous_response_id"),
        ({"input": "a", "unheard_of": 1}, "unheard_of"),
        ({"input": "a", "user": "x" * 257}, "user"),
    ],
)
def test_bodies_of_a_wrong_shape_are_told_what_is_wrong(house: House, body: Any, param: str) -> None:
    answer = house.post("/v1/responses", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_fields_that_change_nothing_are_taken(house: House) -> None:
    more: dict[str, Any] = {
        "user": "someone",
        "prompt_cache_key": "key",
        "safety_identifier": "x",
        "service_tier": "flex",
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    reply = house.respond("Good morning.", **more)
    assert reply.output_text == house.respond("Good morning.").output_text
    assert (reply.user, reply.prompt_cache_key, reply.safety_identifier) == ("someone", "key", "x")

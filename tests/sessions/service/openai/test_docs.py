"""docs/service.md says what becomes of each field of OpenAI's APIs, and no field of theirs is forgotten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from sessions.service.app import build_app
from sessions.service.openai.chat_shapes import ChatRequest
from sessions.service.openai.fields import fates
from sessions.service.openai.response_shapes import ResponseRequest
from tests.sessions.service.fake import FakeBackend

PAGE = (Path(__file__).parents[4] / "docs" / "service.md").read_text("utf-8")
#: Fields of the client's that nothing here has heard of: refused as such.
UNKNOWN = {"access_programs", "background_options", "image"}


@pytest.mark.parametrize(
    ("route", "model"), [("chat/completions", ChatRequest), ("responses", ResponseRequest)]
)
def test_the_tables_say_what_becomes_of_each_field(route: str, model: type[BaseModel]) -> None:
    table = PAGE[PAGE.index(f"`POST /v1/{route}`:\n") :].partition("|---|---|\n")[2].partition("\n\n")[0]
    told = {}
    for line, fate in zip(table.splitlines(), ("used", "ignored", "refused"), strict=True):
        told.update(dict.fromkeys(re.findall(r"`(\w+)`", line), fate))
    assert told == fates(model)


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (completion_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (response_create_params.ResponseCreateParamsStreaming, ResponseRequest),
    ],
)
def test_what_the_client_can_ask_for_is_looked_at(params: Any, model: type[BaseModel]) -> None:
    assert set(get_type_hints(params)) - set(fates(model)) <= UNKNOWN


def test_every_route_is_told() -> None:
    for path, methods in build_app(FakeBackend()).openapi()["paths"].items():
        if path.startswith(("/v1/chat", "/v1/responses", "/v1/conversations", "/v1/models")):
            for method in methods:
                assert f"`{method.upper()} {path}`" in PAGE

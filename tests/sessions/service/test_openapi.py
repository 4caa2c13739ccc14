"""What is published is what is answered: requests made from the description, right and wrong ones, find only
statuses and bodies that it declares, and no 500."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.serving import Served, served

#: A session that there is, so that not every request ends at a 404.
KNOWN = "known"
#: What is looked at in every answer.
CHECKS: list[schemathesis.CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@schemathesis.serializer("application/vnd.tenuto")
def archive(_: schemathesis.SerializationContext, value: object) -> object:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@pytest.fixture(scope="module")
def description() -> dict[str, object]:
    from tests.sessions.service.fake import FakeBackend

    with served(FakeBackend()) as at:
        told: dict[str, object] = at.client.get("/openapi.json").json()
        return told


def operations(description: dict[str, object]) -> list[tuple[str, str]]:
    paths = description["paths"]
    assert isinstance(paths, dict)
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_every_route_is_described_with_its_refusals(description: dict[str, object]) -> None:
    assert len(operations(description)) > 15
    for methods in description["paths"].values():  # type: ignore[attr-defined]
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert operation["summary"]


@pytest.fixture
def small(make_backend: MakeBackend) -> Iterator[Served]:
    with served(make_backend(n_ctx=64, num_cells=1024)) as running:
        yield running


def make_known(at: Served) -> dict[str, str]:
    """What the paths of OpenAI's routes may name."""
    items = [{"role": "user", "content": "a"}]
    response = at.client.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).json()["id"]
    conversation = at.client.post("/v1/conversations", json={"items": items}).json()["id"]
    item = at.client.get(f"/v1/conversations/{conversation}/items").json()["first_id"]
    model = at.client.get("/v1/models").json()["data"][0]["id"]
    return {"response": response, "conversation": conversation, "item": item, "model": model}


def explore(at: Served, examples: int, part: slice = slice(None)) -> int:
    """Try each operation of a part of them with so many examples. Returns how many requests were made."""
    schema = schemathesis.openapi.from_url(f"{at.url}/openapi.json")
    known = make_known(at)
    made = 0
    for found in list(schema.get_all_operations())[part]:
        operation = found.ok()

        def attempt(case: schemathesis.Case) -> None:
            nonlocal made
            made += 1
            if "session" in case.path_parameters and random.Random(made).random() < 0.7:
                at.client.post("/v1/sessions", json={"name": KNOWN})
                case.path_parameters["session"] = KNOWN
            right = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
            for name, there in known.items():  # a wrong path is left as it is
                if right and name in case.path_parameters and random.Random(made).random() < 0.7:
                    case.path_parameters[name] = there
            case.call_and_validate(checks=CHECKS, timeout=60)

        can_be_wrong = any(True for _ in operation.iter_parameters()) or len(operation.body) > 0
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 1 + can_be_wrong]:
            run = settings(
                max_examples=examples,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )(seed(5)(given(case=operation.as_strategy(generation_mode=mode))(attempt)))
            run()
    return made


def test_requests_made_from_the_description_find_no_500_and_nothing_undeclared(small: Served) -> None:
    assert explore(small, 3) > 100


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8))
def test_many_more_of_them_neither(small: Served, first: int) -> None:
    assert explore(small, 60, slice(first, None, 8)) > 60

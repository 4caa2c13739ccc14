"""What is published is what is answered: requests made from the description, right and wrong ones, find only
statuses and bodies that it declares, and no 500."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

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

from serialization.blobs import Store
from sessions.keys import ApiKeys
from sessions.service.backend import Backend
from sessions.service.config import ServiceConfig
from sessions.stores.open import open_store
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import ring
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


@pytest.fixture
def sealed(make_engine: MakeEngine, tmp_path: Path) -> Iterator[Served]:
    """A service with keys, on a sealed store."""
    keyring, keys = ring(tmp_path / "keys"), ApiKeys(tmp_path / "keys")
    key = keys.create("ann")[1]

    def opened(tenant: str) -> Store:
        return open_store(str(tmp_path / "store"), tenant, keyring=keyring)

    backend = Backend(make_engine(n_ctx=64, num_cells=1024), opened)
    with served(backend, ServiceConfig(operators=("ann",)), keys) as running:
        running.client.headers["authorization"] = f"Bearer {key}"
        yield running
    backend.close()


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
    headers = {name: at.client.headers[name] for name in ("authorization",) if name in at.client.headers}
    schema = schemathesis.openapi.from_url(f"{at.url}/openapi.json", headers=headers)
    # With a key each request has it, also one that is wrong by having none.
    checks = [check for check in CHECKS if not headers or check is not negative_data_rejection]
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
            case.call_and_validate(checks=checks, timeout=60, headers=headers)

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
@pytest.mark.parametrize("kind", ["small", "sealed"])
@pytest.mark.parametrize("first", range(8))
def test_many_more_of_them_neither(request: pytest.FixtureRequest, kind: str, first: int) -> None:
    assert explore(request.getfixturevalue(kind), 60, slice(first, None, 8)) > 60

"""OpenAI's real client over a real service: a tiny model, in deterministic mode, on a store of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from sessions.policy import Policy
from sessions.service.backend import Backend, BackendConfig
from sessions.stores.disk import DiskStore
from tests.sessions.service.serving import Served, served

MODEL = "tiny llama"
#: A bias to letters of which no two are one token, so that a reply's text is tokenized as it was said.
LETTERS = {"logit_bias": {str(ord(letter)): 30 for letter in "abcdefghijklmnopqrs"}}
SETTINGS: dict[str, Any] = {
    "n_ctx": 1024,
    "num_cells": 8192,
    "num_seqs": 8,
    "threads": 1,
    "dtype": "f32",
    "deterministic": True,
}


@dataclass(frozen=True)
class OwnKey:
    tenant: str


class AnyKey:
    """Each key is that of a tenant of the same name."""

    def find(self, text: str) -> OwnKey:
        return OwnKey(text)


@dataclass(frozen=True)
class House:
    """A running service, and the client of one of its tenants."""

    backend: Backend
    served: Served
    api: Any  # openai.OpenAI, whose answers may be of more kinds than there are here
    tenant: str

    def of(self, tenant: str) -> House:
        """The same service for another one."""
        return replace(self, api=self.api.with_options(api_key=tenant), tenant=tenant)

    def chat(self, messages: Any, **more: Any) -> Any:
        """A chat completion: by default of 12 tokens, with a seed."""
        if isinstance(messages, str):
            messages = [user(messages)]
        known = {"model": MODEL, "max_tokens": 12, "seed": 1, **more}
        return self.api.chat.completions.create(messages=messages, **known)

    def respond(self, given: Any, seed: int = 1, **more: Any) -> Any:
        """A response, likewise."""
        body = {"seed": seed, **more.pop("extra_body", {})}
        known = {"model": MODEL, "max_output_tokens": 12, "extra_body": body, **more}
        return self.api.responses.create(input=given, **known)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.tenant}", "content-type": "application/json"}
        return self.served.client.request(method, path, headers=headers, **more)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.ask("POST", path, json=body)


Up = Callable[..., AbstractContextManager[House]]


@contextmanager
def started(model: Path, store: Path, tenant: str = "ann", **settings: Any) -> Iterator[House]:
    config = EngineConfig.from_mapping({**SETTINGS, **settings})
    backend = Backend(
        load_engine(model, config),
        lambda name: DiskStore(store, name),
        BackendConfig(policy=Policy(lease=5, grace=10)),
    )
    try:
        with (
            served(backend, keys=AnyKey()) as running,
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=tenant, max_retries=0, timeout=120) as api,
        ):
            yield House(backend, running, api, tenant)
    finally:
        backend.close()


@pytest.fixture
def up(tiny_path: Path, tmp_path: Path) -> Up:
    """Starts a service on the test's store, for as long as a `with` block; several may run at once."""
    return partial(started, tiny_path, tmp_path / "store")


@pytest.fixture(scope="module")
def service(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with started(tiny_path, tmp_path_factory.mktemp("house") / "store") as running:
        yield running


@pytest.fixture
def house(service: House) -> House:
    """The module's service, as a tenant that nobody was before."""
    return service.of(f"t{next(_COUNT)}")


_COUNT = itertools.count()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def cached(reply: Any) -> int:
    """Tokens that a reply says were not read again."""
    usage = reply.usage
    if reply.object == "response":
        return int(usage.input_tokens_details.cached_tokens)
    return int(usage.prompt_tokens_details.cached_tokens)

"""The Python API: conversations for a program of yours, in its own process.

    with Manager.open("model.gguf", "chats") as manager, manager.session("tea") as chat:
        for piece in chat.send("Green or black?"):
            print(piece, end="")

and the same with `async with` and `async for` (docs/python.md). One manager serves any number of threads and
tasks: their replies share the model's batches.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from engine.config import EngineConfig
from engine.errors import SessionExists, SessionNotFound
from engine.generation import Cancel
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import SamplerParams
from sessions import names
from sessions.answer import Answer
from sessions.chat import AsyncChat, Chat, Opening, either
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.policy import Policy
from sessions.restore import Fallback, Reason, RestoreResult
from sessions.service.ask import Ask, ChatMessage, Format, Keep
from sessions.service.backend import Backend, BackendConfig, Turning
from sessions.service.told import Page, SessionView
from sessions.stores.open import open_store

__all__ = [
    "Answer",
    "Ask",
    "AsyncChat",
    "BackendConfig",
    "Chat",
    "ChatMessage",
    "Conversations",
    "EngineConfig",
    "Fallback",
    "Format",
    "Keep",
    "Keyring",
    "Manager",
    "MasterKeys",
    "Opening",
    "Page",
    "Policy",
    "Reason",
    "RestoreResult",
    "SamplerParams",
    "SessionView",
]


class Conversations:
    """The conversations of one tenant of a backend. Safe from many threads. Its verbs block, but for
    two: what `session` and `complete` return does something when it is entered, or heard."""

    def __init__(self, backend: Backend, tenant: str = "default") -> None:
        self.backend = backend
        self.tenant = tenant

    # --- one conversation -----------------------------------------------------------------------

    def session(
        self,
        session: str | None = None,
        system: str | None = None,
        sampler: SamplerParams | None = None,
    ) -> Opening:
        """Open the session of this id or name: `with`, or `async with`. A name that is free, or none, begins
        a new one, with `system` and `sampler`. Raises SessionNotFound for the id of no session, when it is
        opened; that it is being written to elsewhere (LeaseHeld) is found out by the first `send`."""
        return Opening(lambda: Chat(self.backend, self.tenant, self._view(session, system, sampler)))

    def _view(self, session: str | None, system: str | None, sampler: SamplerParams | None) -> SessionView:
        if session is not None:
            try:
                return self.backend.get(self.tenant, session)
            except SessionNotFound:
                if names.is_session_id(session):
                    raise
        try:
            return self.backend.create(self.tenant, session, system, sampler)
        except SessionExists:  # another one was faster
            assert session is not None
            return self.backend.get(self.tenant, session)

    def complete(
        self, messages: Sequence[ChatMessage], ask: Ask | None = None, keep: Keep = Keep.PAST
    ) -> Answer:
        """Hear the reply to a whole conversation that you keep yourself; of its past, what is known here is
        not read again."""
        asked, said = ask or Ask(), tuple(messages)

        def told(gone: Cancel) -> Turning:
            cancel = gone if asked.cancel is None else either(gone, asked.cancel)
            yield from self.backend.complete(self.tenant, said, replace(asked, cancel=cancel), keep)

        return Answer(told)

    # --- all of them ----------------------------------------------------------------------------

    def list(self, limit: int = 20, after: str | None = None, containing: str = "") -> Page:
        """Some sessions, those begun last first; `Page.after` is what to ask for next."""
        return self.backend.list(self.tenant, limit, after, containing)

    def delete(self, session: str) -> None:
        """Forget a session; `tenuto gc` takes its bytes."""
        self.backend.delete(self.tenant, session)


class Manager(Conversations):
    """A model, a store, and the conversations of one tenant in it; those of others by `of`."""

    @classmethod
    def open(
        cls,
        model: str | Path,
        store: str | Path,
        engine: EngineConfig | None = None,
        config: BackendConfig | None = None,
        tenant: str = "default",
        keyring: Keyring | None = None,
    ) -> Self:
        """Load the model at `model` (a GGUF file, a folder of safetensors, "hf:…") for the conversations in
        `store` (a folder, "redis://…" or another store's address), which is sealed with a `keyring`. Both are
        made ready here, which may take some time: ModelNotFound, WeightsRefused, ConfigError, NameRefused,
        StoreUnavailable, SealRefused and others are raised here."""
        loaded = load_engine(model, engine or EngineConfig(num_seqs=16))
        return cls.over(loaded, store, config, tenant, keyring)

    @classmethod
    def over(
        cls,
        engine: Engine,
        store: str | Path,
        config: BackendConfig | None = None,
        tenant: str = "default",
        keyring: Keyring | None = None,
    ) -> Self:
        """The same with an engine that is there already. It is the manager's from now on: `close` ends it."""
        address = os.fspath(store)
        backend = Backend(engine, lambda name: open_store(address, name, keyring=keyring), config)
        manager = cls(backend, tenant)
        try:
            backend.manager(tenant)
        except BaseException:
            backend.close()
            raise
        return manager

    def of(self, tenant: str) -> Conversations:
        """The conversations of another tenant, as long as this manager is open."""
        return Conversations(self.backend, tenant)

    def close(self) -> None:
        """Let nobody begin another turn, end those that run, save them, and let the model go. Raises what
        kept a turn from being saved."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

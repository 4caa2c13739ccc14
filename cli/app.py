"""What commands open: the store, the session manager, a model. Each once, and closed at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cli.folders import default_store
from cli.output import Output
from cli.unlocking import Unlocking

# torch takes a second to import: `--help` and shell completion do without it.
if TYPE_CHECKING:
    from cli.options import EngineOptions
    from engine.runner import Engine
    from serialization.blobs import Store
    from sessions.manager import SessionManager


#: Whose the sessions are where nobody is named: a person's own, and all of a service without API keys.
DEFAULT_TENANT = "default"


@dataclass(slots=True)
class Flags:
    """What -q and --debug said, wherever on the line they stood."""

    quiet: bool = False
    debug: bool = False


class App:
    """One command's view of the floors below. `out` is how it speaks."""

    def __init__(
        self,
        out: Output,
        url: str | None = None,
        unlocking: Unlocking | None = None,
        tenant: str | None = None,
    ) -> None:
        self.out = out
        self.url = url or str(default_store())
        self.unlocking = unlocking or Unlocking.said(None, None)
        self.tenant = tenant or DEFAULT_TENANT
        self._store: Store | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def address(self) -> str:
        """Where the store is, as it may be told to others: without the password that a URL may have."""
        head, at, rest = self.url.rpartition("@")
        scheme, there, _ = head.partition("://")
        return f"{scheme}://{rest}" if at and there else self.url

    @property
    def store(self) -> Store:
        """Raises StoreUnavailable, UsageError for a URL that names no store, SealRefused, KeyFileRefused."""
        from sessions.stores.open import open_store

        if self._store is None:
            self._store = open_store(self.url, self.tenant, keyring=self.unlocking.keyring())
        return self._store

    def manager(
        self, engine: Engine | None = None, policy: Mapping[str, Any] | None = None
    ) -> SessionManager:
        from cli.retention import quota_said
        from sessions.manager import SessionManager
        from sessions.policy import Policy

        said = {"quota": quota_said(), **(policy or {})}
        return SessionManager(self.store, engine, Policy.from_mapping(said), tenant=self.tenant)

    def engine(self, options: EngineOptions, session: str | None = None) -> Engine:
        """The model asked for; failing that, the one that `session` was made with, then smollm2.

        Raises ModelNotFound, UnknownArchitecture, WeightsRefused, ConfigError, DeviceMissing.
        """
        from cli.loading import load

        manifest = self.manager().manifest(session) if session is not None else None
        return load(options, manifest, self.out)

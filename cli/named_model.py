"""The model of the sessions that are moved: loaded when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cli.app import App
from cli.options import EngineOptions
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.runner import Engine
    from serialization.manifest import Manifest


class NamedModel:
    """By -m, or where a session is at hand by what it was made with. No more than the last one that was
    asked for is kept."""

    def __init__(self, app: App, model: str | None, threads: int | None) -> None:
        self._app = app
        self._model = model
        self._config: dict[str, Any] = {} if threads is None else {"threads": threads}
        self._engine: Engine | None = None
        self._key: object = None

    def opened(self, config: Mapping[str, str]) -> Engine:
        """With these settings. Raises UsageError where no model was named, and what loading raises."""
        if self._model is None:
            raise UsageError("this needs the model of the sessions: name it with -m")
        return self._load(EngineOptions(self._model, None, {**self._config, **config}), None)

    def with_room(self, manifest: Manifest) -> Engine:
        """With room for this session twice, and its settings. Raises what loading raises."""
        from cli.verify import with_room

        return self._load(with_room(EngineOptions(self._model, None, self._config), manifest), manifest)

    def _load(self, options: EngineOptions, manifest: Manifest | None) -> Engine:
        from cli.loading import load

        key = (sorted(options.config.items()), None if manifest is None else manifest.fingerprint)
        if self._engine is None or self._key != key:
            self._engine = None
            self._engine, self._key = load(options, manifest, self._app.out), key
        return self._engine

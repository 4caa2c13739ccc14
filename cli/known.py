"""Which model a digest means on this machine, so that a session finds its own without being told."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path


class KnownModels:
    """A small file of hints beside the models: digest of weights or template -> what the user called it.

    A wrong or missing hint costs a question, never an answer: the engine checks fingerprints itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def model(self, weights: str) -> str | None:
        found = self._read().get(f"weights/{weights}")
        return found if found is None or not _is_path(found) or Path(found).exists() else None

    def template(self, digest: str | None) -> str | None:
        return self._read().get(f"template/{digest}")

    def remember(self, weights: str, model: str, digest: str | None, template: str | None) -> None:
        """Note both, absolute where they are paths. That it cannot be written is no error."""
        known = self._read()
        added = {f"weights/{weights}": _absolute(model)}
        if digest is not None and template is not None:
            added[f"template/{digest}"] = _absolute(template)
        if {**known, **added} != known:
            with contextlib.suppress(OSError):
                self._write({**known, **added})

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}

    def _write(self, known: dict[str, str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1, sort_keys=True)
        Path(name).replace(self._path)


def _is_path(text: str) -> bool:
    return text.startswith(os.sep)


def _absolute(text: str) -> str:
    return str(Path(text).expanduser().resolve()) if Path(text).expanduser().exists() else text

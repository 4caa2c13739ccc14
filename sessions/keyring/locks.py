"""Two locks of a folder: many may use its keys at once, and one may change them.

Processes and threads alike. Who wants to change them is let in however many use them: all enter by a gate
that is held for a moment alone. Neither is entered twice by one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sessions.stores.folder import disk_errors, locked, opened_folder, share_locked


@contextlib.contextmanager
def using(folder: Path, gate: Path) -> Iterator[None]:
    """Nobody changes the keys of `folder` inside. `gate` is a folder for this purpose alone."""
    with contextlib.ExitStack() as held:
        with disk_errors(f"using the keys in {folder}"):
            fd = held.enter_context(opened_folder(folder))
            with opened_folder(gate) as entrance, locked(entrance):
                held.enter_context(share_locked(fd))
        yield


@contextlib.contextmanager
def changing(folder: Path, gate: Path) -> Iterator[None]:
    """Nobody else uses or changes the keys of `folder` inside."""
    with contextlib.ExitStack() as held:
        with disk_errors(f"changing the keys in {folder}"):
            held.enter_context(locked(held.enter_context(opened_folder(gate))))
            held.enter_context(locked(held.enter_context(opened_folder(folder))))
        yield

"""Turns that could not be saved are saved as soon as that is possible, asked for or not."""

from __future__ import annotations

import threading
from contextlib import suppress

from sessions.service.common import Common
from sessions.service.held import save_again_unasked


class SavingAgain:
    """A thread that tries each of them again after `pause` seconds, as long as there are some: until then no
    other process can take their sessions. Begins at once, and ends by `close`."""

    def __init__(self, common: Common, pause: float) -> None:
        self._common = common
        self._pause = pause
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saving again", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until what is being saved is saved, or is kept for whoever saves it next."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        residents = self._common.residents
        while not self._ending.wait(self._pause):
            for tenant, session in residents.unsaved():
                unsaved = residents.take_unsaved(tenant, session)
                if unsaved is not None and not self._ending.is_set():
                    with suppress(Exception):  # nothing ends this thread; its turn and the next one are told
                        save_again_unasked(self._common, unsaved)
                elif unsaved is not None:
                    residents.put_unsaved(unsaved)

"""A stored turn on the command line: of this store, or in an archive."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cli.app import App
from cli.files import named_file

if TYPE_CHECKING:
    from serialization.manifest import Manifest

ARCHIVE = ".tenuto"


def manifest_of(app: App, text: str) -> Manifest:
    """`SESSION`, `SESSION@TURN`, `pin:NAME`, or the file of an archive, which is read whole and verified.

    Raises SessionNotFound, StateError, and OSError for a file that cannot be read.
    """
    from serialization.archive import check_archive
    from sessions.named_turn import named_turn

    if text.endswith(ARCHIVE) or os.sep in text:
        with named_file(text).open("rb") as file:
            return check_archive(file)
    return named_turn(app.store, text)

"""A stored turn as a person names it: `SESSION` (its newest), `SESSION@TURN`, or `pin:NAME`.

No name of a session has an `@` or a colon, so that each text means one thing.
"""

from __future__ import annotations

from engine.errors import BlobMissing, SessionNotFound, UsageError
from serialization.blobs import Store
from serialization.manifest import Manifest
from sessions.catalog import Catalog

_PIN = "pin:"


def named_turn(store: Store, text: str) -> Manifest:
    """The manifest that `text` means. A turn is known by its generation, which `inspect` and `ls` tell.

    Raises SessionNotFound, SessionAmbiguous, NameRefused, UsageError for what is no number, and StateError.
    """
    catalog = Catalog(store)
    if text.startswith(_PIN):
        return catalog.pin(text.removeprefix(_PIN)).manifest
    ref, at, turn = text.partition("@")
    newest = catalog.session(catalog.find(ref)).manifest
    if not at:
        return newest
    if not (turn.isascii() and turn.isdigit() and int(turn)):
        raise UsageError(f"{text!r}: after the @ belongs the number of a turn, from 1 on")
    return _back(store, newest, int(turn))


def _back(store: Store, newest: Manifest, turn: int) -> Manifest:
    """Older turns are reached from newer ones, and stay until gc takes them."""
    manifest = newest
    while manifest.generation > turn and manifest.parent is not None:
        try:
            manifest = Manifest.decode(store.get(manifest.parent))
        except BlobMissing:
            break
    if manifest.generation != turn:
        raise SessionNotFound(
            f"turn {turn} of session {newest.session} is not in the store: its turns"
            f" {manifest.generation} to {newest.generation} are (gc takes what no session needs)"
        )
    return manifest

"""Names of sessions and pins, and the refs that stand for them.

A name from outside is checked here, once, and only ever becomes a key of a ref.
"""

from __future__ import annotations

import re

from ulid import ULID

from engine.errors import NameRefused

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")

SESSIONS = "session/"
NAMES = "name/"
PINS = "pin/"
PREFIXES = "prefix/"


def check_name(name: str) -> str:
    """`name` if it may be one. Raises NameRefused otherwise."""
    if not _NAME.fullmatch(name):
        raise NameRefused(
            f"{name!r} may not be a name: 1 to 64 of letters, digits, '.', '_', '-', not '.', '_', '-' first"
        )
    if is_session_id(name):
        raise NameRefused(f"{name!r} may not be a name: it looks like a session id")
    return name


def is_session_id(text: str) -> bool:
    return _ULID.fullmatch(text.upper()) is not None


def new_session_id() -> str:
    return str(ULID())


def like(session: str) -> str:
    """A new id that says of itself that it was made when `session` was."""
    return str(ULID.from_timestamp(ULID.from_str(session).milliseconds))


def made(session: str) -> float:
    """When a session's id was made, by the clock of who made it: the end of that millisecond, in seconds
    since the epoch."""
    return float(ULID.from_str(session).timestamp) + 0.001


def session_ref(session: str) -> str:
    return SESSIONS + session


def name_ref(name: str) -> str:
    return NAMES + name


def pin_ref(name: str) -> str:
    return PINS + name


def name_of_pin(ref: str) -> str:
    return ref.removeprefix(PINS)

"""Ids of OpenAI's kind, which are those of sessions with a word before them, and the model's name.

An id from outside is compared with one pattern, and what is left of it is a ULID: nothing else ever reaches a
store.
"""

from __future__ import annotations

import re

from engine.errors import ModelNotFound, SessionExpired, SessionNotFound
from sessions import names
from sessions.service.told import ModelView

_ID = re.compile(r"(resp|conv)_([0-7][0-9A-HJKMNP-TV-Z]{25})")
_ITEM = re.compile(r"msg_([0-7][0-9A-HJKMNP-TV-Z]{25})_(0|[1-9][0-9]{0,8})")


def new_session() -> str:
    return names.new_session_id()


def response_id(session: str) -> str:
    return f"resp_{session}"


def conversation_id(session: str) -> str:
    return f"conv_{session}"


def item_id(base: str, number: int) -> str:
    """Message `number` of what came under `base`: a response's session, or an id of its own."""
    return f"msg_{base}_{number}"


def session_of(kind: str, given: str, param: str | None = None) -> str:
    """The session of a response ("resp") or conversation ("conv"). Raises SessionNotFound."""
    found = _ID.fullmatch(given)
    if found is None or found[1] != kind:
        raise not_found(kind, given, param)
    return found[2]


def item_of(given: str) -> tuple[str, int]:
    """Base and number of an item. Raises SessionNotFound."""
    found = _ITEM.fullmatch(given)
    if found is None:
        raise SessionNotFound(f"there is no item {given[:80]!r}")
    return found[1], int(found[2])


def not_found(
    kind: str, given: str, param: str | None = None, why: SessionNotFound | None = None
) -> SessionNotFound:
    what = {"resp": "response", "conv": "conversation"}[kind]
    details = {} if param is None else {"param": param}
    text = f"there is no {what} {given[:80]!r}: it expired, was deleted, or never was"
    error = SessionExpired if isinstance(why, SessionExpired) else SessionNotFound
    return error(text, **details)


def check_model(asked: str | None, model: ModelView) -> None:
    """Raises ModelNotFound unless `asked` is the one that there is, or none is asked for."""
    if asked is not None and asked != model.name:
        raise ModelNotFound(
            f"the model {asked[:80]!r} does not exist here, {model.name!r} does", param="model"
        )


def system_fingerprint(model: ModelView) -> str:
    """Changes with the weights."""
    digest = re.sub(r"[^0-9A-Za-z]", "", model.weights.rpartition("-")[2])
    return f"fp_{digest[:12]}"

"""The turn that a session stands at, as HTTP names it: ETag, If-Match and If-None-Match."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header

from engine.errors import StaleSession, StateError, UsageError
from serialization.blobs import BlobId, parse_blob_id
from sessions.service.call import Call
from sessions.service.told import SessionView

_TAG = re.compile(r'\s*(W/)?"([\x21\x23-\x7e]*)"\s*(?:,|$)')

IfMatch = Annotated[
    str | None,
    Header(max_length=4096, description="the ETag that the session must have, or 412"),
]
IfNoneMatch = Annotated[
    str | None,
    Header(max_length=4096, description="the ETag that is known already: 304 if it still is the session's"),
]


def etag(blob: BlobId) -> str:
    return f'"{blob}"'


async def expected(call: Call, session: str, if_match: str | None) -> BlobId | None:
    """What `Ask.expected` is to be for a request's If-Match. Raises StaleSession where none of several tags
    is the session's, or the only one can be nobody's; UsageError for a header that holds no tags."""
    if if_match is None or if_match.strip() == "*":
        return None
    strong = [tag for weak, tag in _tags(if_match) if not weak]
    if len(strong) == 1 and _is_blob(strong[0]):
        return BlobId(strong[0])
    view = await call.run(call.backend.get, call.tenant, session)
    if view.etag not in strong:
        raise _stale(view)
    return view.etag


async def check(call: Call, session: str, if_match: str | None) -> None:
    """For a verb that changes nothing: the session is at what is expected now. Raises StaleSession."""
    at = await expected(call, session, if_match)
    if at is None:
        return
    view = await call.run(call.backend.get, call.tenant, session)
    if view.etag != at:
        raise _stale(view)


def is_known(blob: BlobId, if_none_match: str | None) -> bool:
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or any(tag == blob for _, tag in _tags(if_none_match))


def _stale(view: SessionView) -> StaleSession:
    return StaleSession(
        f"session {view.id} is at turn {view.generation}, which If-Match does not name",
        generation=view.generation,
    )


def _tags(header: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(header):
        tag = _TAG.match(header, at)
        if tag is None:
            raise UsageError("If-Match and If-None-Match hold quoted tags, or *", param="If-Match")
        found.append((tag[1] or "", tag[2]))
        at = tag.end()
    return found


def _is_blob(text: str) -> bool:
    try:
        parse_blob_id(text)
    except StateError:
        return False
    return True

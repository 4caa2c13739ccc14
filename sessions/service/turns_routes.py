"""Turns of sessions: say something, have it said anew, or say something else. As JSON, or as events.

The events of a stream: `begun` (what was restored), any number of `piece`, `ended` (what else the JSON answer
has); or `error`, which is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from engine.errors import TenutoError
from sessions.service import shapes
from sessions.service.ask import Ask
from sessions.service.call import Call, TheCall, restored_headers
from sessions.service.etags import IfMatch, etag, expected
from sessions.service.refusals import answers, body_of
from sessions.service.sessions_routes import Ref
from sessions.service.stream import STREAMED, TurnStream, event
from sessions.service.told import Begun, Ended, Said, Told

router = APIRouter(prefix="/v1/sessions", tags=["turns"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: STREAMED,
    **answers(404, 409, 412, 423, 507),
}


@router.post("/{session}/messages", response_model=shapes.TurnOut, responses=_RESPONSES)
async def messages(call: TheCall, session: Ref, body: shapes.Say, if_match: IfMatch = None) -> Response:
    """Add messages to the session, and reply to them. A client that goes away ends the reply: what was said
    of it is kept."""
    said = body.said()
    return await _reply(
        call, session, body, if_match, lambda ask: call.backend.turn(call.tenant, session, said, ask)
    )


@router.post("/{session}/regenerate", response_model=shapes.TurnOut, responses=_RESPONSES)
async def regenerate(
    call: TheCall, session: Ref, body: shapes.Reply | None = None, if_match: IfMatch = None
) -> Response:
    """Say the last reply anew. With the same sampler and the same seed it is the same."""
    asked = body or shapes.Reply()
    return await _reply(
        call, session, asked, if_match, lambda ask: call.backend.regenerate(call.tenant, session, ask)
    )


@router.post("/{session}/edit", response_model=shapes.TurnOut, responses=_RESPONSES)
async def edit(call: TheCall, session: Ref, body: shapes.Edit, if_match: IfMatch = None) -> Response:
    """Put another text in place of the user's last message, and reply to that."""
    text = body.content
    return await _reply(
        call, session, body, if_match, lambda ask: call.backend.edit(call.tenant, session, text, ask)
    )


async def _reply(
    call: Call,
    session: str,
    body: shapes.Reply,
    if_match: str | None,
    begin: Callable[[Ask], Iterator[Told]],
) -> Response:
    at = await expected(call, session, if_match)
    sampler = await call.run(body.sampler_over, lambda: call.backend.get(call.tenant, session))
    turn = call.turn(body.ask(sampler, at), begin)
    begun = await turn.begun()
    headers = restored_headers(begun.restored)
    if body.stream:
        return TurnStream(turn, begun, _Events(), headers, call.service.config.keepalive)
    ended = await turn.ended()
    if ended.etag is not None:
        headers["etag"] = etag(ended.etag)
    return JSONResponse({**shapes.begun(begun), **shapes.ended(ended)}, headers=headers)


class _Events:
    """The events of a session's turn."""

    def begun(self, begun: Begun) -> Iterable[str]:
        yield event(shapes.begun(begun), "begun")

    def told(self, told: Told) -> Iterable[str]:
        match told:
            case Said(_, piece):
                yield event({"token": piece.token, "text": piece.text, "finish": piece.finish}, "piece")
            case Ended():
                yield event(shapes.ended(told), "ended")

    def failed(self, error: TenutoError) -> Iterable[str]:
        yield event(body_of(error), "error")

    def end(self) -> Iterable[str]:
        return ()

"""Turns of sessions: say something, have it said anew, or say something else. As JSON, or as events.

The events of a stream: `begun` (what was restored), any number of `piece`, `ended` (what else the JSON answer
has); or `error`, which is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.responses import JSONResponse, Response

from engine.errors import TenutoError
from sessions.service import shapes
from sessions.service.ask import Ask
from sessions.service.call import Call, TheCall, restored_headers
from sessions.service.etags import IfMatch, etag, expected
from sessions.service.once import Once
from sessions.service.refusals import answers, body_of
from sessions.service.sessions_routes import Ref
from sessions.service.stream import STREAMED, TurnStream, event
from sessions.service.told import Begun, Ended, Said, Told

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="the client's own name for this turn: asked for under it again, it is not said twice",
    ),
]

router = APIRouter(prefix="/v1/sessions", tags=["turns"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: STREAMED,
    **answers(404, 409, 412, 423, 507),
}


@router.post("/{session}/messages", response_model=shapes.TurnOut, responses=_RESPONSES)
async def messages(
    call: TheCall, session: Ref, body: shapes.Say, if_match: IfMatch = None, key: IdempotencyKey = None
) -> Response:
    """Add messages to the session, and reply to them. A client that goes away ends the reply: what was said
    of it is kept."""
    said, given = body.said(), Given(if_match, key)
    return await _reply(
        call, session, body, given, lambda ask: call.backend.turn(call.tenant, session, said, ask)
    )


@router.post("/{session}/regenerate", response_model=shapes.TurnOut, responses=_RESPONSES)
async def regenerate(
    call: TheCall,
    session: Ref,
    body: shapes.Reply | None = None,
    if_match: IfMatch = None,
    key: IdempotencyKey = None,
) -> Response:
    """Say the last reply anew. With the same sampler and the same seed it is the same."""
    asked, given = body or shapes.Reply(), Given(if_match, key)
    return await _reply(
        call, session, asked, given, lambda ask: call.backend.regenerate(call.tenant, session, ask)
    )


@router.post("/{session}/edit", response_model=shapes.TurnOut, responses=_RESPONSES)
async def edit(
    call: TheCall, session: Ref, body: shapes.Edit, if_match: IfMatch = None, key: IdempotencyKey = None
) -> Response:
    """Put another text in place of the user's last message, and reply to that."""
    text, given = body.content, Given(if_match, key)
    return await _reply(
        call, session, body, given, lambda ask: call.backend.edit(call.tenant, session, text, ask)
    )


@dataclass(frozen=True, slots=True)
class Given:
    """What a turn's headers say."""

    if_match: str | None
    key: str | None

    def once(self, path: str, body: shapes.Reply) -> Once | None:
        """The same turn may be asked for as JSON one time, and as events the other."""
        if self.key is None:
            return None
        verb, asked = path.rpartition("/")[2], body.model_dump_json(exclude={"stream"})
        return Once.of(self.key, f"{verb} {asked}".encode())


async def _reply(
    call: Call,
    session: str,
    body: shapes.Reply,
    given: Given,
    begin: Callable[[Ask], Iterator[Told]],
) -> Response:
    at = await expected(call, session, given.if_match)
    sampler = await call.run(body.sampler_over, lambda: call.backend.get(call.tenant, session))
    asked = replace(body.ask(sampler, at), once=given.once(call.request.url.path, body))
    turn = call.turn(asked, begin)
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

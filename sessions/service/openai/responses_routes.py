"""/v1/responses: replies that are kept, of which others go on; and /v1/responses/{id}, long after."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import JSONResponse, Response

from sessions.service.call import Call, TheCall, restored_headers
from sessions.service.openai import items
from sessions.service.openai.answering import Answering, Library
from sessions.service.openai.likely import Likely
from sessions.service.openai.naming import check_model, item_id, response_id, session_of
from sessions.service.openai.response_events import ResponseEvents
from sessions.service.openai.response_shapes import (
    Deleted,
    InputRequest,
    InputTokens,
    ResponseOut,
    ResponseRequest,
)
from sessions.service.refusals import answers
from sessions.service.stream import STREAMED, TurnStream

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"])

Ref = Annotated[str, Path(max_length=128, description="a response's id")]
Order = Literal["asc", "desc"]
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: STREAMED,
    **answers(404, 409, 412, 423, 507),
}


@router.post("", response_model=ResponseOut, responses=_RESPONSES)
async def create(call: TheCall, body: ResponseRequest) -> Response:
    """A reply to what is given, and to what a response or conversation before it has; whole or as events."""
    check_model(body.model, call.backend.model)
    ask = body.ask(call.backend.model.n_ctx)
    answering = Answering(_library(call), call.backend, call.tenant, body)
    turn = call.turn(ask, answering.told)
    begun = await turn.begun()
    headers = restored_headers(begun.restored)
    events = ResponseEvents(answering, None if ask.logprobs is None else Likely(call.backend))
    if body.stream:
        return TurnStream(turn, begun, events, headers, call.service.config.keepalive)
    async for told in turn.events():
        assert told is not None
        list(events.told(told))
    return JSONResponse(events.whole(), headers=headers)


@router.post("/input_tokens", response_model=InputTokens, responses=answers(404))
async def input_tokens(call: TheCall, body: InputRequest) -> Response:
    """How many tokens a prompt would have."""
    check_model(body.model, call.backend.model)
    library = _library(call)
    past = await call.run(library.past, body)
    count = await call.run(call.backend.count, library.prompt(body, past))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


@router.get("/{response}", response_model=ResponseOut, responses=answers(404))
async def get(
    call: TheCall,
    response: Ref,
    stream: Annotated[
        Literal["false"] | None, Query(description="streams are of new responses alone")
    ] = None,
) -> Response:
    """A response that was stored, as it was; without the likelihoods of its tokens."""
    found, _ = await call.run(_library(call).get, session_of("resp", response))
    call.record.session = found.id
    return JSONResponse(found.shown())


@router.get("/{response}/input_items", response_model=items.ItemList, responses=answers(404))
async def input_items(
    call: TheCall,
    response: Ref,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "desc",
    after: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """What was given to it: not what came before."""
    found, messages = await call.run(_library(call).get, session_of("resp", response))
    given = messages[-1 - found.num_inputs : -1]
    shown = [
        items.Item(item_id(found.id, at), message.role, message.text) for at, message in enumerate(given)
    ]
    return JSONResponse(items.page(shown, limit, order, after))


@router.delete("/{response}", response_model=Deleted, responses=answers(404, 409, 412, 423))
async def delete(call: TheCall, response: Ref) -> Response:
    """Forget it. Responses that go on from it stay, and so do conversations that it is in."""
    session = session_of("resp", response)
    await call.run(_library(call).delete, session)
    return JSONResponse({"id": response_id(session), "object": "response", "deleted": True})


def _library(call: Call) -> Library:
    return Library(call.backend, call.tenant)

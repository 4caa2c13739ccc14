"""Sessions: begin, list, talk, fork, rewind, save, delete. Every answer about one session has its ETag."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.responses import JSONResponse, Response

from sessions.restore import RestoreResult
from sessions.service import shapes
from sessions.service.call import Call, TheCall, restored_headers
from sessions.service.etags import IfMatch, IfNoneMatch, check, etag, expected, is_known
from sessions.service.refusals import answers
from sessions.service.told import SessionView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

#: A session's id, the unique start of one, or its name.
Ref = Annotated[str, Path(min_length=1, max_length=64, description="id, unique start of an id, or name")]


@router.post("", status_code=201, response_model=shapes.SessionOut, responses=answers(409))
async def create(call: TheCall, body: shapes.Create | None = None) -> Response:
    """A new session, without turns."""
    asked = body or shapes.Create()
    sampler = None if asked.sampler is None else asked.sampler.new()
    view = await call.run(call.backend.create, call.tenant, asked.name, asked.system, sampler, asked.title)
    return session_answer(call, view, 201)


@router.get("", response_model=shapes.SessionList, responses=answers())
async def sessions(
    call: TheCall,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=128)] = None,
    containing: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """The sessions, the newest first, one page of them. `containing`: only those with this text in their name
    or title."""
    page = await call.run(call.backend.list, call.tenant, limit, after, containing)
    return JSONResponse(
        {"object": "list", "data": [shapes.line(view) for view in page.sessions], "after": page.after}
    )


@router.get(
    "/{session}",
    response_model=shapes.SessionOut,
    responses={304: {"description": "It still has the ETag that is known"}, **answers(404)},
)
async def session(call: TheCall, session: Ref, if_none_match: IfNoneMatch = None) -> Response:
    """One session, with all that was said."""
    view = await call.run(call.backend.get, call.tenant, session)
    if is_known(view.etag, if_none_match):
        return Response(status_code=304, headers={"etag": etag(view.etag)})
    return session_answer(call, view)


@router.patch("/{session}", response_model=shapes.SessionOut, responses=answers(404, 409, 412, 423))
async def rename(call: TheCall, session: Ref, body: shapes.Rename, if_match: IfMatch = None) -> Response:
    """Give it another name, or none."""
    at = await expected(call, session, if_match)
    view = await call.run(call.backend.rename, call.tenant, session, body.name, at)
    return session_answer(call, view)


@router.delete("/{session}", status_code=204, responses=answers(404, 409, 412, 423))
async def delete(call: TheCall, session: Ref, if_match: IfMatch = None) -> Response:
    """Forget it. The bytes that only it needs are taken by the next gc."""
    at = await expected(call, session, if_match)
    await call.run(call.backend.delete, call.tenant, session, at)
    return Response(status_code=204)


@router.post(
    "/{session}/fork",
    status_code=201,
    response_model=shapes.SessionOut,
    responses=answers(404, 409, 412, 423),
)
async def fork(
    call: TheCall, session: Ref, body: shapes.Fork | None = None, if_match: IfMatch = None
) -> Response:
    """A new session with the same past, or its past without the last turns. No row is copied."""
    asked = body or shapes.Fork()
    await check(call, session, if_match)
    view = await call.run(call.backend.fork, call.tenant, session, asked.name, asked.turns_back)
    return session_answer(call, view, 201)


@router.post("/{session}/rewind", response_model=shapes.Rewound, responses=answers(404, 409, 412, 423))
async def rewind(
    call: TheCall, session: Ref, body: shapes.Rewind | None = None, if_match: IfMatch = None
) -> Response:
    """Take back its last turns."""
    at = await expected(call, session, if_match)
    turns = 1 if body is None else body.turns
    view, restored = await call.run(call.backend.rewind, call.tenant, session, turns, at)
    return with_restored(call, view, restored)


@router.post("/{session}/save", response_model=shapes.SavedOut, responses=answers(404, 409, 412, 423, 507))
async def save(call: TheCall, session: Ref) -> Response:
    """Store a turn that could not be saved when it was said."""
    view, saved = await call.run(call.backend.save, call.tenant, session)
    call.record.session = view.id
    body = {"session": shapes.whole(view), "saved": None if saved is None else shapes.saved(saved)}
    return JSONResponse(body, headers={"etag": etag(view.etag)})


# --- answers ----------------------------------------------------------------------------------


def session_answer(call: Call, view: SessionView, status: int = 200) -> Response:
    call.record.session = view.id
    headers = {"etag": etag(view.etag)}
    if status == 201:
        headers["location"] = f"/v1/sessions/{view.id}"
    return JSONResponse(shapes.whole(view), status, headers)


def with_restored(call: Call, view: SessionView, restored: RestoreResult) -> Response:
    call.record.session = view.id
    call.service.metrics.restored(restored)
    body: dict[str, Any] = {"session": shapes.whole(view), "restored": shapes.restored(restored)}
    return JSONResponse(body, headers={"etag": etag(view.etag), **restored_headers(restored)})

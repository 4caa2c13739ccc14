"""Sessions as `.tenuto` archives: one is sent while it is read from the store, one is taken into a file of
bounded size, and believed once all of it was verified."""

from __future__ import annotations

import asyncio
import tempfile
from typing import IO, Annotated, BinaryIO, cast

import anyio
from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine.errors import StateError, TenutoError
from sessions.service import shapes
from sessions.service.call import Call, TheCall
from sessions.service.etags import etag
from sessions.service.pipe import Pipe
from sessions.service.refusals import answers, body_of, code_of, refusal
from sessions.service.sessions_routes import Ref, session_answer

router = APIRouter(prefix="/v1/sessions", tags=["archives"])

MEDIA_TYPE = "application/vnd.tenuto"
_BINARY = {"schema": {"type": "string", "format": "binary"}}


@router.get(
    "/{session}/export",
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPE: _BINARY}}, **answers(404, 409)},
)
async def export(call: TheCall, session: Ref) -> Response:
    """The session as one archive, with all that is needed to go on from it elsewhere."""
    view = await call.run(call.backend.get, call.tenant, session)
    call.record.session = view.id
    pipe = Pipe()
    writing = asyncio.ensure_future(call.run_long(_export, call, view.id, pipe))
    first = await pipe.read()
    if not first:
        await writing  # raises why there is nothing
    headers = {
        "etag": etag(view.etag),
        "content-disposition": f'attachment; filename="{view.id}.tenuto"',
        "cache-control": "no-store",
    }
    return _Sent(call, first, pipe, writing, headers)


@router.post(
    "/import",
    status_code=201,
    response_model=shapes.SessionOut,
    responses=answers(409, 507),
    openapi_extra={"requestBody": {"required": True, "content": {MEDIA_TYPE: _BINARY}}},
)
async def import_(call: TheCall, name: Annotated[shapes.Name | None, Query()] = None) -> Response:
    """A new session from an archive. It appears once the whole of it was verified."""
    limits = call.service.config
    if call.service.imports.locked():
        text = f"{limits.max_imports} archives are being taken, and no more may be"
        return refusal(429, text, "too_many_imports", retry_after=limits.retry_after)
    async with call.service.imports:
        with tempfile.TemporaryFile() as file:
            if not await _take(call, file, limits.max_import):
                text = f"the archive has more than {limits.max_import:,} bytes"
                return refusal(413, text, "body_too_large")
            try:
                view = await call.run_long(call.backend.import_, call.tenant, cast(BinaryIO, file), name)
            except StateError as error:  # of bytes that this request brought, and no state of ours
                call.record.error = code_of(error)
                return JSONResponse(body_of(error, 400), 400)
    return session_answer(call, view, 201)


def _export(call: Call, session: str, pipe: Pipe) -> None:
    try:
        call.backend.export(call.tenant, session, cast(BinaryIO, pipe))
    finally:
        pipe.end()


async def _take(call: Call, file: IO[bytes], most: int) -> bool:
    """The request's body, into `file`; False once it is larger than that."""
    declared = call.request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        return False
    size = 0
    async for piece in call.request.stream():
        size += len(piece)
        if size > most:
            return False
        await call.run(file.write, piece)
    await call.run(file.seek, 0)
    return True


class _Sent(Response):
    """Sends a pipe to its end. Of an export that fails midway the last chunk never comes, so that nobody
    takes a part of an archive for a whole one."""

    media_type = MEDIA_TYPE

    def __init__(
        self, call: Call, first: bytes, pipe: Pipe, writing: asyncio.Future[None], headers: dict[str, str]
    ) -> None:
        super().__init__(None, 200, headers)
        del self.headers["content-length"]
        self._call, self._first, self._pipe, self._writing = call, first, pipe, writing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._watch, receive)
            try:
                await self._send(send)
            finally:
                self._pipe.leave()
                watching.cancel_scope.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        piece = self._first
        while piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await self._pipe.read()
        try:
            await self._writing
        except (TenutoError, BrokenPipeError) as error:
            self._call.record.error = code_of(error) if isinstance(error, TenutoError) else "client_gone"
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._pipe.leave()

"""/v1/chat/completions: stateless for the client. The past that it sends again is not read again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from engine.errors import TenutoError
from sessions.service.call import Call, TheCall, restored_headers
from sessions.service.openai.chat_shapes import ChatCompletion, ChatRequest
from sessions.service.openai.likely import Likely
from sessions.service.openai.naming import check_model, new_session, system_fingerprint
from sessions.service.openai.usage import chat_usage, finish_reason
from sessions.service.refusals import answers, body_of
from sessions.service.stream import STREAMED, TurnStream, event
from sessions.service.told import Begun, Ended, Said, Spoken, Told

router = APIRouter(prefix="/v1/chat", tags=["OpenAI"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: STREAMED,
    **answers(404, 507),
}


@router.post("/completions", response_model=ChatCompletion, responses=_RESPONSES)
async def completions(call: TheCall, body: ChatRequest) -> Response:
    """One or more replies to a conversation, whole or as events."""
    backend = call.backend
    check_model(body.model, backend.model)
    messages, ask = body.said(), body.ask(backend.model.n_ctx)
    turn = call.turn(ask, lambda ask: backend.complete(call.tenant, messages, ask, body.keep), body.slot)
    begun = await turn.begun()
    headers = restored_headers(begun.restored)
    replies = _Replies(call, body)
    if body.stream:
        return TurnStream(turn, begun, replies, headers, call.service.config.keepalive)
    list(replies.begun(begun))
    async for told in turn.events():
        assert told is not None
        list(replies.told(told))
    return JSONResponse(replies.whole(), headers=headers)


class _Replies:
    """The chunks of a stream, and with what it gathers of them the whole."""

    def __init__(self, call: Call, asked: ChatRequest) -> None:
        count = asked.n or 1
        self._likely = Likely(call.backend) if asked.logprobs else None
        options = asked.stream_options
        self._with_usage = options is not None and options.include_usage is True
        self._gathered: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._spoken: tuple[Spoken, ...] = ()
        self._usage: dict[str, Any] = {}
        self._head = {
            "id": f"chatcmpl-{new_session()}",
            "created": int(time.time()),
            "model": call.backend.model.name,
            "system_fingerprint": system_fingerprint(call.backend.model),
        }

    def begun(self, begun: Begun) -> Iterable[str]:
        self._begun = begun
        for index in range(len(self._gathered)):
            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def told(self, told: Told) -> Iterable[str]:
        match told:
            case Said(index, piece):
                entries = [] if self._likely is None else self._likely.entries(piece)
                self._gathered[index] += entries
                if piece.text or entries:
                    yield self._chunk(index, {"content": piece.text}, entries)
                if piece.finish is not None:
                    yield self._chunk(index, {}, finish=finish_reason(piece.finish))
            case Ended():
                self._spoken = told.replies
                self._usage = chat_usage(self._begun, told.replies)
                if self._with_usage:
                    yield event({**self._named("chat.completion.chunk"), "choices": [], "usage": self._usage})

    def failed(self, error: TenutoError) -> Iterable[str]:
        yield event(body_of(error))

    def end(self) -> Iterable[str]:
        yield event("[DONE]")

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": spoken.text, "refusal": None},
                "logprobs": self._logprobs(gathered),
                "finish_reason": finish_reason(spoken.finish),
            }
            for index, (spoken, gathered) in enumerate(zip(self._spoken, self._gathered, strict=True))
        ]
        return {**self._named("chat.completion"), "choices": choices, "usage": self._usage}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        entries: list[dict[str, Any]] | None = None,
        finish: str | None = None,
    ) -> str:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": finish,
        }
        usage = {"usage": None} if self._with_usage else {}
        return event({**self._named("chat.completion.chunk"), "choices": [choice], **usage})

    def _named(self, kind: str) -> dict[str, Any]:
        return {"id": self._head["id"], "object": kind, **self._head}

    def _logprobs(self, entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        if self._likely is None:
            return None
        return {"content": entries, "refusal": None}

"""Texts to token ids and back, with the shapes of llama-server."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from sessions.service.call import Call, TheCall
from sessions.service.refusals import answers
from sessions.service.shapes import Asked

router = APIRouter(tags=["words"])


class Tokenize(Asked):
    content: str
    parse_special: bool = Field(
        default=True, description="control tokens that are written in it are themselves"
    )
    with_pieces: bool = Field(default=False, description="with each id the text or bytes that it stands for")


class Piece(BaseModel):
    """`piece` is a text, or a list of bytes that are none by themselves."""

    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    tokens: list[int] | list[Piece]


class Detokenize(Asked):
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class Content(BaseModel):
    content: str


@router.post("/tokenize", response_model=Tokens, responses=answers())
async def tokenize(call: TheCall, body: Tokenize) -> Response:
    """The ids of a text, without what a prompt begins with."""
    ids = await call.run(call.backend.tokenize, body.content, body.parse_special)
    if not body.with_pieces:
        return JSONResponse({"tokens": ids})
    return JSONResponse({"tokens": await call.run(lambda: [_piece(call, token) for token in ids])})


@router.post("/detokenize", response_model=Content, responses=answers())
async def detokenize(call: TheCall, body: Detokenize) -> Response:
    """The text of ids."""
    return JSONResponse({"content": await call.run(call.backend.detokenize, body.tokens)})


def _piece(call: Call, token: int) -> dict[str, Any]:
    data = call.backend.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}

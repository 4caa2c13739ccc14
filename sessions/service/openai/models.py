"""/v1/models: the one that there is."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from sessions.service.call import TheCall
from sessions.service.openai.naming import check_model
from sessions.service.refusals import answers
from sessions.service.told import ModelView

router = APIRouter(prefix="/v1/models", tags=["OpenAI"])


class Model(BaseModel):
    """`n_ctx` tokens a conversation may have."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    n_ctx: int
    vocab_size: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


@router.get("", response_model=ModelList, responses=answers())
async def models(call: TheCall) -> Response:
    """The models: one."""
    return JSONResponse({"object": "list", "data": [_shape(call.backend.model)]})


@router.get("/{model:path}", response_model=Model, responses=answers(404))
async def model(call: TheCall, model: Annotated[str, Path(max_length=1024)]) -> Response:
    """One model."""
    check_model(model, call.backend.model)
    return JSONResponse(_shape(call.backend.model))


def _shape(model: ModelView) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "tenuto",
        "n_ctx": model.n_ctx,
        "vocab_size": model.vocab_size,
    }

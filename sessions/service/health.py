"""Whether the service lives, what it runs, and what it counts."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from sessions.service.call import TheCall
from sessions.service.refusals import answers, refusal

router = APIRouter(tags=["service"])


class Health(BaseModel):
    status: Literal["ok", "draining"]


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
async def health(call: TheCall) -> Response:
    """200 while turns are taken, 503 once the service is being ended."""
    draining = call.backend.load().draining
    return JSONResponse({"status": "draining" if draining else "ok"}, 503 if draining else 200)


_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


@router.get("/metrics", response_class=Response, responses={200: _TEXT, **answers()})
async def metrics(call: TheCall) -> Response:
    """Counters and histograms in Prometheus's text format. Where there are API keys an operator's is needed:
    they are of all tenants."""
    if not call.is_operator:
        call.record.error = "operators_only"
        return refusal(403, "this is for an operator's key (see --operator)", call.record.error)
    return Response(await call.run(call.service.metrics.text), media_type=CONTENT_TYPE_LATEST)

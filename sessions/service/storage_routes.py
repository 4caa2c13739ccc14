"""What the tenant has stored, and what gc would take of it. Nothing is taken here."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from sessions.service.call import TheCall
from sessions.service.refusals import answers

router = APIRouter(prefix="/v1/storage", tags=["storage"])


class Storage(BaseModel):
    """Stored bytes: rows (with point state) and manifests in use, what no session needs any more, and the
    rest, which is what finds them."""

    object: Literal["storage"]
    tenant: str
    rows_bytes: int
    manifest_bytes: int
    superseded_bytes: int
    index_bytes: int
    total_bytes: int
    kept: list[str]


class Plan(BaseModel):
    """Sessions that would be deleted, those that would give up their rows, and the blobs that may go."""

    object: Literal["gc.plan"]
    expired: list[str]
    released: list[str]
    num_blobs: int
    nbytes: int


@router.get("", response_model=Storage, responses=answers())
async def storage(call: TheCall) -> Response:
    """The tenant's bytes, by what they are for, and the names of its kept turns."""
    usage = await call.run(call.backend.usage, call.tenant)
    pins = await call.run(call.backend.pins, call.tenant)
    return JSONResponse(
        {
            "object": "storage",
            "tenant": call.tenant,
            "rows_bytes": usage.rows_bytes,
            "manifest_bytes": usage.manifest_bytes,
            "superseded_bytes": usage.superseded_bytes,
            "index_bytes": usage.index_bytes,
            "total_bytes": usage.total,
            "kept": [pin.name for pin in pins],
        }
    )


@router.get("/gc", response_model=Plan, responses=answers(409))
async def plan(call: TheCall) -> Response:
    """What `tenuto gc` would do now, as the service's policy says it."""
    found = await call.run_long(call.backend.manager(call.tenant).plan_gc)
    return JSONResponse(
        {
            "object": "gc.plan",
            "expired": list(found.expired),
            "released": list(found.released),
            "num_blobs": len(found.blobs),
            "nbytes": found.nbytes,
        }
    )

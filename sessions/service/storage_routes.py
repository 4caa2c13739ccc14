"""What the tenant has stored, and what gc would take of it. Nothing is taken here."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from sessions.listing import ages
from sessions.service.call import TheCall
from sessions.service.refusals import answers

router = APIRouter(prefix="/v1/storage", tags=["storage"])


class Tier(BaseModel):
    """`kind` is memory, disk or redis; `budget_bytes` null for the last one, which holds the truth."""

    kind: str
    nbytes: int
    budget_bytes: int | None


class Age(BaseModel):
    """Blobs that were last written less than `below_seconds` ago (null: all that are older)."""

    below_seconds: float | None
    num_blobs: int
    nbytes: int


class Storage(BaseModel):
    """Stored bytes: rows (with point state) and manifests in use, what no session needs any more, and the
    rest, which is what finds them. Null is without limit."""

    object: Literal["storage"]
    tenant: str
    rows_bytes: int
    manifest_bytes: int
    superseded_bytes: int
    index_bytes: int
    total_bytes: int
    kept: list[str]
    tiers: list[Tier]
    ages: list[Age]
    quota_bytes: int | None
    budget_bytes: int | None
    rows_ttl_seconds: float | None
    session_ttl_seconds: float | None


class Plan(BaseModel):
    """Sessions that would be deleted, those that would give up their rows, and the blobs that may go."""

    object: Literal["gc.plan"]
    expired: list[str]
    released: list[str]
    num_blobs: int
    nbytes: int


@router.get("", response_model=Storage, responses=answers())
async def storage(call: TheCall) -> Response:
    """The tenant's bytes, by what they are for, by tier and by age; its limits; and the names of its kept
    turns."""
    manager = call.backend.manager(call.tenant)
    usage = await call.run_long(manager.usage)
    pins = await call.run(manager.pins)
    tiers = await call.run_long(manager.store.tiers)
    by_age = await call.run_long(ages, manager.store)
    policy = manager.policy
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
            "tiers": [
                {"kind": tier.kind, "nbytes": tier.nbytes, "budget_bytes": tier.budget} for tier in tiers
            ],
            "ages": [
                {"below_seconds": age.below, "num_blobs": age.num_blobs, "nbytes": age.nbytes}
                for age in by_age
            ],
            "quota_bytes": policy.quota,
            "budget_bytes": policy.budget,
            "rows_ttl_seconds": policy.rows_ttl,
            "session_ttl_seconds": policy.session_ttl,
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

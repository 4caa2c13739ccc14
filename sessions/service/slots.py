"""llama-server's slots and props, in its shapes.

A slot stands for a session of the tenant: the last ones that were talked in here, or restored. What is saved
"to a file" is kept as a pin of the file's name, in the store and for every worker; no name becomes a path.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from engine.errors import NoSlot, SessionNotFound, UsageError
from engine.state import SamplerParams
from sessions.service.call import Call, TheCall
from sessions.service.refusals import answers
from sessions.service.shapes import Asked

router = APIRouter(tags=["llama-server"])


class SlotOut(BaseModel):
    """As llama-server's, and the session that it stands for with its tokens."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    session: str | None
    n_past: int


class FileName(Asked):
    filename: str | None = None


class SaveTimings(BaseModel):
    save_ms: float


class RestoreTimings(BaseModel):
    restore_ms: float


class SlotSaved(BaseModel):
    id_slot: int
    filename: str
    n_saved: int
    n_written: int
    timings: SaveTimings


class SlotRestored(BaseModel):
    id_slot: int
    filename: str
    n_restored: int
    n_read: int
    timings: RestoreTimings


class SlotErased(BaseModel):
    id_slot: int
    n_erased: int


class Modalities(BaseModel):
    vision: bool
    audio: bool


class Props(BaseModel):
    """What runs here; of a slot's settings those of a session that was told no others."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str
    modalities: Modalities
    build_info: str
    is_sleeping: bool


@router.get("/slots", response_model=list[SlotOut], responses=answers())
async def slots(call: TheCall, fail_on_no_slot: Annotated[int | None, Query()] = None) -> Response:
    """The slots. With `fail_on_no_slot` 503 while all are at work."""
    load, model = call.backend.load(), call.backend.model
    if fail_on_no_slot and load.running >= model.num_seqs:
        raise NoSlot("every slot is at work")
    return JSONResponse(await call.run(_listed, call))


@router.post(
    "/slots/{slot}", response_model=SlotSaved | SlotRestored | SlotErased, responses=answers(404, 409, 507)
)
async def act(
    call: TheCall,
    slot: Annotated[int, Path(ge=0, lt=2**31)],
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    body: FileName | None = None,
) -> Response:
    """Keep what a slot stands for under a name, have it stand for what is kept, or for nothing."""
    call.service.slots.check(slot)
    if action == "erase":
        return JSONResponse(await call.run(_erase, call, slot))
    if body is None or body.filename is None:
        raise UsageError(f"to {action} needs a filename", param="filename")
    return JSONResponse(
        await call.run({"save": _save, "restore": _restore}[action], call, slot, body.filename)
    )


@router.get("/props", response_model=Props, responses=answers())
async def props(call: TheCall) -> Response:
    """What the service runs, and how it replies if nothing else is asked."""
    model = call.backend.model
    return JSONResponse(
        {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": model.n_ctx,
                "speculative": False,
                "is_processing": False,
                "params": {**asdict(SamplerParams()), "logit_bias": []},
            },
            "total_slots": call.service.slots.num_slots,
            "model_path": model.name,
            "model_alias": model.name,
            "chat_template": model.template or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"tenuto {version('tenuto')}",
            "is_sleeping": False,
        }
    )


# --- in a thread ------------------------------------------------------------------------------


def _listed(call: Call) -> list[dict[str, Any]]:
    n_ctx, listed = call.backend.model.n_ctx, []
    for number, slot in enumerate(call.service.slots.of(call.tenant)):
        n_past, session = 0, slot.session
        if session is not None:
            try:
                n_past = call.backend.get(call.tenant, session).length
            except SessionNotFound:  # deleted, or replaced by the one that went on from it
                session = None
        listed.append(
            {
                "id": number,
                "id_task": slot.used if session is not None else -1,  # llama-server's word for none
                "n_ctx": n_ctx,
                "speculative": False,
                "is_processing": session is not None and call.service.slots.at_work(call.tenant, session),
                "session": session,
                "n_past": n_past,
            }
        )
    return listed


def _save(call: Call, slot: int, filename: str) -> dict[str, Any]:
    started, session = time.perf_counter(), _session(call, slot)
    pin = call.backend.pin(call.tenant, session, filename)  # a file of this name is written over there
    return {
        "id_slot": slot,
        "filename": filename,
        "n_saved": pin.length,
        "n_written": _nbytes(call, session),
        "timings": {"save_ms": _ms(started)},
    }


def _restore(call: Call, slot: int, filename: str) -> dict[str, Any]:
    started = time.perf_counter()
    view = call.backend.load_pin(call.tenant, filename)
    call.record.session = view.id
    call.service.slots.put(call.tenant, view.id, slot)
    return {
        "id_slot": slot,
        "filename": filename,
        "n_restored": view.length,
        "n_read": _nbytes(call, view.id),
        "timings": {"restore_ms": _ms(started)},
    }


def _erase(call: Call, slot: int) -> dict[str, Any]:
    """The slot stands for nothing; its session stays. An empty slot is as erased as it can be."""
    session, length = call.service.slots.of(call.tenant)[slot].session, 0
    if session is not None:
        try:
            length = call.backend.get(call.tenant, session).length
        except SessionNotFound:
            length = 0
    call.service.slots.empty(call.tenant, slot)
    return {"id_slot": slot, "n_erased": length}


def _session(call: Call, slot: int) -> str:
    session = call.service.slots.of(call.tenant)[slot].session
    if session is None:
        raise SessionNotFound(f"slot {slot} stands for no session yet: nothing was said in it")
    call.record.session = session
    return session


def _nbytes(call: Call, session: str) -> int:
    """The bytes of what a session needs, encoded, those that it shares among them."""
    return sum(ref.nbytes for ref in call.backend.manager(call.tenant).manifest(session).blobs())


def _ms(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)

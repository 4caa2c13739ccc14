"""/v1/conversations and their items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from sessions.service.ask import ChatMessage
from sessions.service.call import Call, TheCall
from sessions.service.openai import items
from sessions.service.openai.conversation_log import Conversation, ConversationLog
from sessions.service.openai.fields import Metadata, Request
from sessions.service.openai.naming import conversation_id, new_session, session_of
from sessions.service.refusals import answers

router = APIRouter(prefix="/v1/conversations", tags=["OpenAI"])

Ref = Annotated[str, Path(max_length=128, description="a conversation's id")]
ItemRef = Annotated[str, Path(max_length=128, description="an item's id")]
Items = Annotated[list[dict[str, Any]], Field(max_length=20)]
Order = Literal["asc", "desc"]
_CHANGES = answers(404, 409, 412, 423, 507)


class Create(Request):
    items: Items | None = None
    metadata: Metadata | None = None


class Update(Request):
    metadata: Metadata | None


class Add(Request):
    items: Annotated[Items, Field(min_length=1)]


class ConversationOut(BaseModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class Deleted(BaseModel):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


@router.post("", response_model=ConversationOut, responses=answers(507))
async def create(call: TheCall, body: Create | None = None) -> Response:
    """A new conversation, with its first items if there are some."""
    asked = body or Create()
    messages = items.read_items(asked.items or [], "items")
    return _shown(await call.run(_log(call).create, asked.metadata or {}, messages))


@router.get("/{conversation}", response_model=ConversationOut, responses=answers(404))
async def get(call: TheCall, conversation: Ref) -> Response:
    return _shown(await call.run(_log(call).get, _session(conversation)))


@router.post("/{conversation}", response_model=ConversationOut, responses=_CHANGES)
async def update(call: TheCall, conversation: Ref, body: Update) -> Response:
    """Other metadata in place of what it has."""
    return _shown(await call.run(_log(call).set_metadata, _session(conversation), body.metadata or {}))


@router.delete("/{conversation}", response_model=Deleted, responses=_CHANGES)
async def delete(call: TheCall, conversation: Ref) -> Response:
    """Forget it. Its responses stay."""
    session = _session(conversation)
    await call.run(_log(call).delete, session)
    return JSONResponse({"id": conversation_id(session), "object": "conversation.deleted", "deleted": True})


@router.get("/{conversation}/items", response_model=items.ItemList, responses=answers(404))
async def list_items(
    call: TheCall,
    conversation: Ref,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "desc",
    after: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """A page of its items, the last first."""
    found = await call.run(_log(call).get, _session(conversation))
    return JSONResponse(items.page(found.items(), limit, order, after))


@router.post("/{conversation}/items", response_model=items.ItemList, responses=_CHANGES)
async def add_items(call: TheCall, conversation: Ref, body: Add) -> Response:
    """Put items at its end, without a reply to them."""
    messages = items.read_items(body.items, "items")
    base = new_session()
    found = await call.run(_log(call).add, _session(conversation), messages, base)
    return JSONResponse(_added(found, messages))


@router.get("/{conversation}/items/{item}", response_model=items.ItemOut, responses=answers(404))
async def get_item(call: TheCall, conversation: Ref, item: ItemRef) -> Response:
    found = await call.run(_log(call).get, _session(conversation))
    return JSONResponse(found.item(item).shown())


@router.delete("/{conversation}/items/{item}", response_model=ConversationOut, responses=_CHANGES)
async def delete_item(call: TheCall, conversation: Ref, item: ItemRef) -> Response:
    """Take an item out. What comes after it is read again with the next response."""
    return _shown(await call.run(_log(call).remove, _session(conversation), item))


def _log(call: Call) -> ConversationLog:
    return ConversationLog(call.backend, call.tenant)


def _session(conversation: str) -> str:
    return session_of("conv", conversation)


def _added(conversation: Conversation, messages: Sequence[ChatMessage]) -> dict[str, Any]:
    return items.page(conversation.items()[-len(messages) :], len(messages), "asc", None)


def _shown(conversation: Conversation) -> Response:
    return JSONResponse(
        {
            "id": conversation_id(conversation.id),
            "object": "conversation",
            "created_at": int(conversation.created),
            "metadata": conversation.note.metadata,
        }
    )

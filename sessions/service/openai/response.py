"""A response: how it stands, while it is said and afterwards, and how that is shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.reply import Finish
from sessions.service.openai.items import Item
from sessions.service.openai.naming import conversation_id, item_id, response_id
from sessions.service.openai.notes import ResponseNote, Settings, Status, Usage
from sessions.service.told import Begun, SessionView, Spoken


@dataclass(frozen=True, slots=True)
class Response:
    """`id` is its session's; times are seconds since the epoch. Without a `status` it is being said."""

    id: str
    model: str
    created: int
    instructions: str | None
    previous: str | None
    conversation: str | None
    num_inputs: int
    settings: Settings
    store: bool
    status: Status | None = None
    completed: int | None = None
    text: str = ""
    usage: Usage | None = None

    @property
    def item(self) -> Item:
        """What is said, after the inputs."""
        status = {None: "in_progress", "completed": "completed"}.get(self.status, "incomplete")
        return Item(item_id(self.id, self.num_inputs), "assistant", self.text, status)

    def finished(self, begun: Begun, reply: Spoken, completed: int) -> Response:
        """As it stands when all was said."""
        return replace(
            self,
            status=_status(reply.finish),
            completed=completed,
            text=reply.text,
            usage=Usage(
                input_tokens=begun.prompt_tokens,
                cached_tokens=begun.restored.restored,
                output_tokens=reply.num_tokens,
            ),
        )

    def note(self, messages: int) -> ResponseNote:
        """What is kept with its session, which has so many messages."""
        assert self.status is not None, "what is not said yet is not kept"
        assert self.usage is not None, "what was said has a cost"
        return ResponseNote(
            messages=messages,
            inputs=self.num_inputs,
            instructions=self.instructions is not None,
            previous=self.previous,
            conversation=self.conversation,
            created=self.created,
            completed=self.completed or self.created,
            status=self.status,
            usage=self.usage,
            settings=self.settings,
        )

    def shown(self, logprobs: list[dict[str, Any]] | None = None, error: Any = None) -> dict[str, Any]:
        settings = self.settings
        status = "failed" if error is not None else self.status or "in_progress"
        done = self.status is not None and error is None
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": response_id(self.id),
            "object": "response",
            "created_at": self.created,
            "completed_at": self.completed if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": cut,
            "instructions": self.instructions,
            "model": self.model,
            "output": [self.item.shown(logprobs)] if done else [],
            "previous_response_id": None if self.previous is None else response_id(self.previous),
            "conversation": None if self.conversation is None else {"id": conversation_id(self.conversation)},
            "store": self.store,
            "usage": None if self.usage is None else _usage(self.usage),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_output_tokens": settings.max_output_tokens,
            "top_logprobs": settings.top_logprobs,
            "metadata": settings.metadata,
            "user": settings.user,
            "prompt_cache_key": settings.prompt_cache_key,
            "safety_identifier": settings.safety_identifier,
            "text": {"format": {"type": settings.format}},
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "truncation": "disabled",
            "background": False,
        }


def _status(finish: Finish) -> Status:
    match finish:
        case "eos" | "stop":
            return "completed"
        case "cancelled":
            return "cancelled"
        case _:
            return "incomplete"


def stored_response(view: SessionView, note: ResponseNote) -> Response:
    """As it was, by what was kept of it."""
    return Response(
        id=view.id,
        model=view.model,
        created=note.created,
        instructions=view.messages[0].text if note.instructions else None,
        previous=note.previous,
        conversation=note.conversation,
        num_inputs=note.inputs,
        settings=note.settings,
        store=True,
        status=note.status,
        completed=note.completed,
        text=view.messages[note.messages - 1].text,
        usage=note.usage,
    )


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }

"""A response as the events of a stream, in the order in which OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.errors import TenutoError
from sessions.service.openai.answering import Answering
from sessions.service.openai.items import output_text
from sessions.service.openai.likely import Likely
from sessions.service.refusals import code_of
from sessions.service.stream import event
from sessions.service.told import Begun, Ended, Said, Told


class ResponseEvents:
    """Each event says its type twice, and has a number; and with what it gathers it makes the whole."""

    def __init__(self, answering: Answering, likely: Likely | None) -> None:
        self._answering = answering
        self._likely = likely
        self._logprobs: list[dict[str, Any]] = []
        self._count = 0

    def begun(self, begun: Begun) -> Iterable[str]:
        response = self._answering.response
        yield self._event("response.created", response=response.shown())
        yield self._event("response.in_progress", response=response.shown())
        item = {**response.item.shown(), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._of_part("response.content_part.added", part=output_text(""))

    def told(self, told: Told) -> Iterable[str]:
        match told:
            case Said(_, piece):
                entries = [] if self._likely is None else self._likely.entries(piece)
                self._logprobs += entries
                if piece.text or entries:
                    yield self._of_part("response.output_text.delta", delta=piece.text, logprobs=entries)
            case Ended():
                yield from self._ended()

    def failed(self, error: TenutoError) -> Iterable[str]:
        """`error` is of OpenAI's kinds, and says ours in its message."""
        told = {"code": "server_error", "message": f"{code_of(error)}: {error}"}
        yield self._event("response.failed", response=self._answering.response.shown(error=told))

    def end(self) -> Iterable[str]:
        return ()

    def whole(self) -> dict[str, Any]:
        return self._answering.response.shown(self._logprobs)

    def _ended(self) -> Iterable[str]:
        response = self._answering.response
        text = response.text
        yield self._of_part("response.output_text.done", text=text, logprobs=self._logprobs)
        yield self._of_part("response.content_part.done", part=output_text(text, self._logprobs))
        item = response.item.shown(self._logprobs)
        yield self._event("response.output_item.done", output_index=0, item=item)
        name = "response.completed" if response.status == "completed" else "response.incomplete"
        yield self._event(name, response=self.whole())

    def _of_part(self, kind: str, **fields: Any) -> str:
        item = self._answering.response.item.id
        return self._event(kind, item_id=item, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        told = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return event(told, kind)

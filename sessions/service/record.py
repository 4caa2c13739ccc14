"""What the log and the metrics will say of a request. Never a word of what was said in it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from sessions.restore import Reason
from sessions.service.told import Begun, Ended, Told

_KEY = "tenuto.record"


@dataclass(slots=True)
class Record:
    """Filled in while the request is answered. `tenant` is None until its key was looked at, `route` (its
    template, not its path) where there is none; tokens are of the turn that the request ran."""

    request_id: str
    trace_id: str | None = None
    tenant: str | None = None
    session: str | None = None
    reason: Reason | None = None
    prompt_tokens: int | None = None
    restored_tokens: int | None = None
    recomputed_tokens: int | None = None
    reply_tokens: int | None = None
    saved: bool | None = None
    error: str | None = None

    def hear(self, told: Told) -> None:
        """What a turn told."""
        match told:
            case Begun(session, prompt_tokens, restored):
                self.session, self.prompt_tokens, self.reason = session, prompt_tokens, restored.reason
                self.restored_tokens, self.recomputed_tokens = restored.restored, restored.recomputed
            case Ended():
                self.session = told.session or self.session
                self.reply_tokens = sum(reply.num_tokens for reply in told.replies)
                self.saved = told.save_error is None and not told.pending


def attach(scope: Scope, record: Record) -> None:
    scope[_KEY] = record


def record_of(scope: Scope) -> Record:
    record: Record = scope[_KEY]
    return record

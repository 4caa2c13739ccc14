"""Structured logs: one JSON object a line, one line a request, and no text of conversations in any."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import traceback
from typing import Any, TextIO

from blake3 import blake3

from sessions.service.record import Record
from sessions.service.sweeper import Swept


class Log:
    """Writes to `out`; to nowhere if None. Safe from many threads. That nobody can read it is no error."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._lock = threading.Lock()

    def request(self, record: Record, route: str, method: str, status: int, seconds: float) -> None:
        self._line(
            event="request",
            request_id=record.request_id,
            trace_id=record.trace_id,
            tenant=None if record.tenant is None else tenant_hash(record.tenant),
            session=record.session,
            route=route,
            method=method,
            status=status,
            ms=round(seconds * 1000, 1),
            error=record.error,
            reason=record.reason,
            prompt_tokens=record.prompt_tokens,
            restored_tokens=record.restored_tokens,
            recomputed_tokens=record.recomputed_tokens,
            reply_tokens=record.reply_tokens,
            saved=record.saved,
        )

    def bug(self, record: Record, error: BaseException) -> None:
        """An exception that is none of ours: where it comes from, without its message, which may quote what
        was said."""
        frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        self._line(
            event="bug",
            request_id=record.request_id,
            trace_id=record.trace_id,
            kind=type(error).__name__,
            frames=frames,
        )

    def swept(self, swept: Swept) -> None:
        """What a sweep of one tenant's store did, or what kept it from that."""
        tenant, ms = tenant_hash(swept.tenant), round(swept.seconds * 1000, 1)
        if swept.result is None:
            self._line(event="sweep_failed", tenant=tenant, ms=ms, error=type(swept.error).__name__)
            return
        result = swept.result
        self._line(
            event="swept",
            tenant=tenant,
            ms=ms,
            expired=len(result.expired),
            released=len(result.released),
            skipped=len(result.skipped),
            num_blobs=result.num_blobs,
            nbytes=result.nbytes,
        )

    def note(self, event: str, **fields: Any) -> None:
        self._line(event=event, **fields)

    def _line(self, **fields: Any) -> None:
        if self._out is None:
            return
        told = {"time": round(time.time(), 3), **{k: v for k, v in fields.items() if v is not None}}
        line = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
        with self._lock, contextlib.suppress(OSError, ValueError):  # its reader left, or closed it
            self._out.write(line + "\n")
            self._out.flush()


def tenant_hash(tenant: str) -> str:
    """The same for the same tenant, and not its name."""
    return blake3(tenant.encode()).hexdigest(length=6)

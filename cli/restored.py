"""The one truthful line after a resume."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cli.output import Output, counted, duration

if TYPE_CHECKING:
    from sessions.restore import RestoreResult


def restored_line(result: RestoreResult) -> str:
    """`resumed 3,941 tokens in 48 ms (recomputed 0)`, the reason where it is not `exact`, what else there is
    to say, and what became of the draft where one was stored or is missed."""
    restored, taken = counted(result.restored, "token"), duration(result.seconds)
    line = f"resumed {restored} in {taken} (recomputed {result.recomputed:,})"
    why = [] if result.reason == "exact" else [str(result.reason)]
    if why or result.detail:
        line += f": {', '.join([*why, result.detail] if result.detail else why)}"
    return line if result.draft is None else f"{line}; draft {result.draft}"


def tell_restored(out: Output, result: RestoreResult) -> None:
    """-q silences a resume that lacked nothing, never one that did."""
    if result.reason == "exact" and not (result.draft or "").startswith("rebuilt"):
        out.note(restored_line(result))
    else:
        out.warn(restored_line(result))


def tell_reused(out: Output, result: RestoreResult | None) -> None:
    """What a turn reused, where that is worth a line: what it lacked is never silenced."""
    if result is None or result.reason == "new":
        return
    if result.reason == "prefix":
        out.note(
            f"shared {counted(result.restored, 'token')} with an earlier session (read {result.recomputed:,})"
        )
    else:
        out.warn(restored_line(result))


def restored_data(result: RestoreResult) -> dict[str, Any]:
    return asdict(result)

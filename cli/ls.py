"""`tenuto ls`: what is stored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cli.app import App
from cli.arguments import as_data
from cli.options import with_app
from cli.output import moment, shorten, size
from cli.retention import retention_options
from engine.errors import ProblemsFound, UsageError
from sessions.names import is_session_id

if TYPE_CHECKING:
    from sessions.listing import Page, Usage
    from sessions.session import Pin, SessionInfo


@click.command()
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Sessions to show at most."
)
@click.option("--after", metavar="ID", help="Go on behind this session: those begun before it.")
@click.option("--all", "every", is_flag=True, help="Show all of them, however many.")
@retention_options
@with_app
def ls(app: App, limit: int, after: str | None, every: bool, retention: dict[str, object]) -> None:
    """List the sessions, the newest first, with the bytes that each has alone and shares with others.

    Of a store with more sessions than --limit those begun last are shown, page by page and without their
    bytes, so that no others have to be read.
    """
    manager = app.manager(policy=retention)
    if after is not None and (every or not is_session_id(after)):
        raise UsageError("--after takes the whole id of a session, and not --all beside it")
    if not every:
        page = manager.page(limit, None if after is None else after.upper())
        if after is not None or page.after is not None:
            _print_page(app, page)
            return
    sessions, pins, usage, unreadable = manager.list(), manager.pins(), manager.usage(), manager.unreadable()
    _print(app, sessions, pins, usage, list(unreadable))
    if unreadable:
        raise ProblemsFound(
            f"{', '.join(unreadable)}: cannot be read ({next(iter(unreadable.values()))}); "
            "`tenuto check` tells more"
        )


def _print_page(app: App, page: Page) -> None:
    if app.out.as_json:
        app.out.data({"sessions": [as_data(info) for info in page.sessions], "after": page.after})
        return
    _print_table(app, page.sessions)
    if page.after is not None:
        app.out.note(f"there are more: `tenuto ls --after {page.after}`, or --all")


def _print(
    app: App, sessions: list[SessionInfo], pins: list[Pin], usage: Usage, unreadable: list[str]
) -> None:
    if app.out.as_json:
        app.out.data(
            {
                "sessions": [as_data(info) for info in sessions],
                "pins": [asdict(pin) for pin in pins],
                "usage": {**asdict(usage), "total": usage.total},
                "unreadable": unreadable,
            }
        )
        return
    _print_table(app, sessions)
    if pins:
        app.out.text()
        kept = [[pin.name, pin.session, f"{pin.length:,}", moment(pin.created)] for pin in pins]
        app.out.table(["KEPT AS", "SESSION", ">TOKENS", "SINCE"], kept)
    app.out.text()
    app.out.text(
        f"total {size(usage.total)}: rows {size(usage.rows_bytes)}, manifests {size(usage.manifest_bytes)}, "
        f"superseded {size(usage.superseded_bytes)}, index {size(usage.index_bytes)}"
    )


def _print_table(app: App, sessions: Sequence[SessionInfo]) -> None:
    width = 30 if sys.stdout.isatty() else 60
    rows = [
        [
            info.id,
            info.name or "",
            shorten(info.title, width),
            str(info.turns),
            f"{info.length:,}",
            size(info.own_bytes),
            size(info.shared_bytes),
            moment(info.updated),
            info.model,
        ]
        for info in sessions
    ]
    app.out.table(["ID", "NAME", "TITLE", ">TURNS", ">TOKENS", ">OWN", ">SHARED", "SAVED", "MODEL"], rows)

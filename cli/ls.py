"""`tenuto ls`: what is stored."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cli.app import App
from cli.arguments import as_data
from cli.options import with_app
from cli.output import moment, shorten, size
from cli.retention import retention_options
from engine.errors import ProblemsFound

if TYPE_CHECKING:
    from sessions.listing import Usage
    from sessions.session import Pin, SessionInfo


@click.command()
@retention_options
@with_app
def ls(app: App, retention: dict[str, object]) -> None:
    """List the sessions, the newest first, with the bytes that each has alone and shares with others."""
    manager = app.manager(policy=retention)
    sessions, pins, usage, unreadable = manager.list(), manager.pins(), manager.usage(), manager.unreadable()
    _print(app, sessions, pins, usage, list(unreadable))
    if unreadable:
        raise ProblemsFound(
            f"{', '.join(unreadable)}: cannot be read ({next(iter(unreadable.values()))}); "
            "`tenuto check` tells more"
        )


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
    if pins:
        app.out.text()
        kept = [[pin.name, pin.session, f"{pin.length:,}", moment(pin.created)] for pin in pins]
        app.out.table(["KEPT AS", "SESSION", ">TOKENS", "SINCE"], kept)
    app.out.text()
    app.out.text(
        f"total {size(usage.total)}: rows {size(usage.rows_bytes)}, manifests {size(usage.manifest_bytes)}, "
        f"superseded {size(usage.superseded_bytes)}, index {size(usage.index_bytes)}"
    )

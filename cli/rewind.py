"""`tenuto rewind`: take back turns."""

from __future__ import annotations

import click

from cli.app import App
from cli.arguments import as_data, session_argument
from cli.options import with_app
from cli.output import counted


@click.command()
@session_argument
@click.argument("turns", type=click.IntRange(min=1), default=1)
@with_app
def rewind(app: App, session: str, turns: int) -> None:
    """Take back the last TURNS turns of SESSION (default: 1); each begins with what you said."""
    info = app.manager().rewind(session, turns)
    if app.out.as_json:
        app.out.data(as_data(info))
    else:
        app.out.note(f"{info.id} is back at {counted(info.length, 'token')}, {counted(info.turns, 'turn')}")

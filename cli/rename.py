"""`tenuto rename`: call a session something else."""

from __future__ import annotations

import click

from cli.app import App
from cli.arguments import as_data, session_argument
from cli.options import with_app


@click.command()
@session_argument
@click.argument("name")
@with_app
def rename(app: App, session: str, name: str) -> None:
    """Give SESSION the name NAME."""
    info = app.manager().rename(session, name)
    if app.out.as_json:
        app.out.data(as_data(info))
    else:
        app.out.note(f"{info.id} is now called {info.name}")

"""`tenuto load`: a new session from a kept turn."""

from __future__ import annotations

import click

from cli.app import App
from cli.arguments import as_data, pin_argument
from cli.options import with_app
from cli.output import counted


@click.command()
@pin_argument
@with_app
def load(app: App, name: str) -> None:
    """Open a new session that goes on from the turn kept as NAME; print its id.

    What was kept stays as it is, and no stored row is copied.
    """
    info = app.manager().load(name)
    if app.out.as_json:
        app.out.data(as_data(info))
        return
    app.out.text(info.id)
    app.out.note(f"{counted(info.length, 'token')} of {name}; talk on with: tenuto resume {info.id}")

"""`tenuto save`: keep a turn under a name."""

from __future__ import annotations

from dataclasses import asdict

import click

from cli.app import App
from cli.arguments import session_argument
from cli.options import with_app
from cli.output import counted


@click.command()
@session_argument
@click.argument("name")
@with_app
def save(app: App, session: str, name: str) -> None:
    """Keep the newest turn of SESSION under NAME, out of reach of gc and expiry.

    `tenuto load NAME` opens a new session from it, as often as you like.
    """
    pin = app.manager().pin(session, name)
    if app.out.as_json:
        app.out.data(asdict(pin))
    else:
        app.out.note(f"kept {counted(pin.length, 'token')} of {pin.session} as {pin.name}")

"""`tenuto rm`: forget sessions and kept turns."""

from __future__ import annotations

import sys

import click

from cli.app import App
from cli.arguments import complete_pin, complete_session
from cli.options import with_app
from engine.errors import SessionNotFound, UsageError


@click.command()
@click.argument("sessions", nargs=-1, metavar="SESSION...", shell_complete=complete_session)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_pin,
    help="A name given by `save`; may be repeated.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@with_app
def rm(app: App, sessions: tuple[str, ...], pins: tuple[str, ...], yes: bool) -> None:
    """Delete each SESSION; `tenuto gc` frees its bytes. Kept turns stay until `--pin` names them."""
    if not sessions and not pins:
        raise UsageError("nothing to delete: name a session, or a kept turn with --pin")
    manager = app.manager()
    infos = list({info.id: info for info in map(manager.info, sessions)}.values())
    there = {pin.name for pin in manager.pins()}
    for pin in pins:  # a wrong name is refused before anything is deleted
        if pin not in there:
            raise SessionNotFound(f"there is no pin {pin!r}")
    if sys.stdin.isatty() and not yes:
        what = [info.name or info.id for info in infos] + [f"kept turn {pin}" for pin in pins]
        click.confirm(f"Delete {', '.join(what)}?", abort=True, err=True)
    for info in infos:
        manager.delete(info.id)
    for pin in dict.fromkeys(pins):
        manager.unpin(pin)
    if app.out.as_json:
        app.out.data({"sessions": [info.id for info in infos], "pins": list(pins)})
    else:
        app.out.note(f"deleted {len(infos)} sessions and {len(pins)} kept turns")

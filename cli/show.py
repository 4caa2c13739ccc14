"""`tenuto show`: read a conversation."""

from __future__ import annotations

import click

from cli.app import App
from cli.arguments import as_data, session_argument
from cli.options import with_app
from cli.output import counted, moment, size


@click.command()
@session_argument
@with_app
def show(app: App, session: str) -> None:
    """Print what was said in SESSION, and what it holds."""
    manager = app.manager()
    info, manifest = manager.info(session), manager.manifest(session)
    messages = [{"role": message.role, "text": message.text} for message in manifest.messages]
    if app.out.as_json:
        app.out.data({**as_data(info), "messages": messages})
        return
    name = f"  ({info.name})" if info.name else ""
    app.out.text(f"{info.id}{name}")
    tokens, turns = counted(info.length, "token"), counted(info.turns, "turn")
    app.out.text(f"{info.model}, {tokens}, {turns}, saved {moment(info.updated)}")
    app.out.text(f"{size(info.own_bytes)} of its own, {size(info.shared_bytes)} shared")
    if info.parent:
        app.out.text(f"forked from {info.parent}")
    if info.pins:
        app.out.text(f"kept as {', '.join(info.pins)}")
    for message in messages:
        app.out.text()
        app.out.text(f"[{message['role']}]")
        app.out.text(message["text"])

"""Sessions and kept turns on the command line: arguments that complete themselves, and their record."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from cli.app import App
from cli.output import Output, shorten
from cli.unlocking import Unlocking
from engine.errors import TenutoError

if TYPE_CHECKING:
    from sessions.session import SessionInfo

#: Of so many sessions, those begun last, names and ids are completed.
_COMPLETED = 1000


def as_data(info: SessionInfo) -> dict[str, Any]:
    return asdict(info)


def complete_session(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = []
    with contextlib.suppress(TenutoError, OSError), _quiet_app(ctx) as app:
        for info in app.manager().page(_COMPLETED).sessions:
            word = info.name or info.id
            if word.lower().startswith(incomplete.lower()):
                found.append(CompletionItem(word, help=shorten(info.title, 50)))
    return found


def complete_pin(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = []
    with contextlib.suppress(TenutoError, OSError), _quiet_app(ctx) as app:
        found = [CompletionItem(pin.name) for pin in app.manager().pins() if pin.name.startswith(incomplete)]
    return found


def _quiet_app(ctx: click.Context) -> App:
    said = Unlocking.said(ctx.params.get("keys"), ctx.params.get("master_key"))
    return App(Output(quiet=True, as_json=False), ctx.params.get("url"), said, ctx.params.get("of"))


session_argument = click.argument("session", metavar="SESSION", shell_complete=complete_session)
pin_argument = click.argument("name", metavar="NAME", shell_complete=complete_pin)

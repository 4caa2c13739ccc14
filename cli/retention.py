"""How long things are kept, as said on the command line or in the environment."""

from __future__ import annotations

import functools
import os
from typing import Any

import click

from cli.options import Command
from engine.errors import UsageError
from sessions import amounts

QUOTA = "TENUTO_QUOTA"


def duration(text: str) -> float:
    """30, 90s, 15m, 12h, 30d, 2w: seconds, unless a unit is given."""
    try:
        return amounts.seconds(str(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def byte_size(text: str) -> int:
    """500M, 10G: bytes, unless a unit is given; powers of 1,000."""
    try:
        return amounts.nbytes(str(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def quota_said() -> int | None:
    """Bytes that may be stored in all, as the environment says it for every command. Raises UsageError."""
    text = os.environ.get(QUOTA)
    if not text:
        return None
    try:
        return amounts.nbytes(text)
    except ValueError as error:
        raise UsageError(f"{QUOTA}: {error}") from None


_OPTIONS = (
    click.option(
        "--rows-ttl",
        type=duration,
        envvar="TENUTO_ROWS_TTL",
        metavar="AGE",
        help="Sessions not used for so long give up their rows; text stays.  [env: TENUTO_ROWS_TTL]",
    ),
    click.option(
        "--session-ttl",
        type=duration,
        envvar="TENUTO_SESSION_TTL",
        metavar="AGE",
        help="Sessions not used for so long are deleted, unless kept.  [env: TENUTO_SESSION_TTL]",
    ),
    click.option(
        "--budget",
        type=byte_size,
        envvar="TENUTO_BUDGET",
        metavar="SIZE",
        help="Bytes that rows may take; the sessions used longest ago give theirs up.  [env: TENUTO_BUDGET]",
    ),
)


def retention_options(function: Command) -> Command:
    """Adds --rows-ttl, --session-ttl and --budget; the command takes what was given as `retention`."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        said = {key: kwargs.pop(key) for key in ("rows_ttl", "session_ttl", "budget")}
        retention = {key: value for key, value in said.items() if value is not None}
        return function(*args, retention=retention, **kwargs)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command

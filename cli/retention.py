"""How long things are kept, as said on the command line or in the environment."""

from __future__ import annotations

import functools
import re
from typing import Any

import click

from cli.options import Command

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def duration(text: str) -> float:
    """30, 90s, 15m, 12h, 30d, 2w: seconds, unless a unit is given."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", str(text).strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is no duration; say 90s, 15m, 12h, 30d or 2w")
    return float(match[1]) * _UNITS[match[2] or "s"]


def byte_size(text: str) -> int:
    """500M, 10G: bytes, unless a unit is given; powers of 1,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", str(text).strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; say 500M or 10G")
    return int(float(match[1]) * _SIZES[match[2]])


_OPTIONS = (
    click.option(
        "--rows-ttl",
        type=duration,
        envvar="TENUTO_ROWS_TTL",
        metavar="AGE",
        help="Sessions not saved for so long give up their rows; text stays.  [env: TENUTO_ROWS_TTL]",
    ),
    click.option(
        "--session-ttl",
        type=duration,
        envvar="TENUTO_SESSION_TTL",
        metavar="AGE",
        help="Sessions not saved for so long are deleted, unless kept.  [env: TENUTO_SESSION_TTL]",
    ),
    click.option(
        "--budget",
        type=byte_size,
        envvar="TENUTO_BUDGET",
        metavar="SIZE",
        help="Bytes that rows may take; the sessions saved longest ago give theirs up.  [env: TENUTO_BUDGET]",
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

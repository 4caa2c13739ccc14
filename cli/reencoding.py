"""What sessions are to be made anew as: options, folded into one argument."""

from __future__ import annotations

import functools
from typing import Any

import click

from cli.options import CACHE_TYPES, Command

_OPTIONS = (
    click.option("--type-k", type=CACHE_TYPES, help="Rows of K as this dtype; the manifest states the loss."),
    click.option("--type-v", type=CACHE_TYPES, help="Rows of V as this dtype."),
    click.option("--codec", type=click.Choice(["default", "fast", "raw"]), help="How rows are encoded."),
    click.option("--level", type=click.IntRange(1, 19), help="How hard the codec tries."),
    click.option("--chunk-tokens", type=click.IntRange(min=1), help="Tokens of a chunk of rows."),
    click.option("--cut", type=click.IntRange(min=0), metavar="N", help="The first N tokens alone."),
    click.option(
        "--trim-windows/--full-windows",
        "trimmed",
        default=None,
        help="Rows of sliding windows that going on needs, or those of all tokens, or nothing is done.",
    ),
)


def reencoding_options(function: Command) -> Command:
    """Adds the options; the command takes what was given as `wanted`, by the fields of `Reencoding`."""

    @functools.wraps(function)
    def command(*args: Any, trimmed: bool | None, **kwargs: Any) -> Any:
        from serialization.reencode.reencoding import Windows

        fields = ("type_k", "type_v", "codec", "level", "chunk_tokens", "cut")
        said = {name: kwargs.pop(name) for name in fields}
        said["windows"] = None if trimmed is None else Windows.NEEDED if trimmed else Windows.FULL
        wanted = {name: value for name, value in said.items() if value is not None}
        return function(*args, wanted=wanted, **kwargs)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command

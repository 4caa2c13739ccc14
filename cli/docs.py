"""docs/cli.md, made from the commands themselves: `python -m cli.docs > docs/cli.md`."""

from __future__ import annotations

import inspect
from typing import Any

import click

from cli.main import tenuto

_HEAD = """\
# The command line

Made by `make docs` from `tenuto --help` and its commands; do not edit by hand. Exit codes are in the README.
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD, _section(tenuto, "tenuto", None)]
    root = click.Context(tenuto, info_name="tenuto", **_settings())
    for name in tenuto.list_commands(root):
        parts += _sections(tenuto.commands[name], name, root)
    return "\n".join(parts)


def _sections(command: click.Command, name: str, parent: click.Context) -> list[str]:
    """Of a command, and of those that it has in turn."""
    parts = [_section(command, name, parent)]
    if isinstance(command, click.Group):
        ctx = click.Context(command, info_name=name, parent=parent, **_settings())
        parts += [_section(command.commands[inner], inner, ctx) for inner in command.list_commands(ctx)]
    return parts


def _section(command: click.Command, name: str, parent: click.Context | None) -> str:
    with click.Context(command, info_name=name, parent=parent, **_settings()) as ctx:
        return f"## {ctx.command_path}\n\n```text\n{inspect.cleandoc(command.get_help(ctx))}\n```\n"


def _settings() -> dict[str, Any]:
    # The same width wherever it is made; help is then the same text everywhere.
    return {"terminal_width": 100, "max_content_width": 100, "help_option_names": ["-h", "--help"]}


if __name__ == "__main__":
    print(render(), end="")

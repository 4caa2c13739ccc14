"""Groups of commands, listed in the order that they are met in."""

from __future__ import annotations

import click


class Ordered(click.Group):
    """Lists its commands as they were added, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

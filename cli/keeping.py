"""What a service keeps of whom, and when it is stored and swept, as said on the command line."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.options import Command
from cli.retention import QUOTA, byte_size, duration
from engine.errors import UsageError

if TYPE_CHECKING:
    from sessions.service.write_back import Bounds
    from sessions.tenants import Policies


@dataclass(frozen=True, slots=True)
class Keeping:
    """`quota` is everyone's, unless the file of `tenants` says otherwise; `sweep` None: not by itself."""

    quota: int | None
    tenants: Path | None
    sweep: float | None
    write_back: int | None
    write_back_age: float

    def policies(self, retention: Mapping[str, Any]) -> Policies:
        """What each tenant may keep: the options, and over them the file. Raises ConfigError, UsageError."""
        from sessions.policy import Policy
        from sessions.tenants import Policies

        base = Policy.from_mapping({"quota": self.quota, **retention})
        if self.tenants is None:
            return Policies(base)
        try:
            text = self.tenants.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.tenants}: {error}") from None
        return Policies.parse(text, base)

    def bounds(self) -> Bounds | None:
        """How much may wait to be saved; None: each turn is saved before it ends."""
        from sessions.service.write_back import Bounds

        return None if self.write_back is None else Bounds(self.write_back, self.write_back_age)


_OPTIONS = (
    click.option(
        "--quota",
        type=byte_size,
        envvar=QUOTA,
        metavar="SIZE",
        help=f"Bytes that each tenant may store in all; then nothing is added (507).  [env: {QUOTA}]",
    ),
    click.option(
        "--tenants",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Quotas, budgets and times to live of single tenants (TOML; docs/service.md).",
    ),
    click.option(
        "--sweep",
        type=duration,
        default="10m",
        show_default=True,
        metavar="AGE",
        help="How often to free what nothing needs and what has outlived its time, as `tenuto gc` does.",
    ),
    click.option("--no-sweep", is_flag=True, help="Leave that to `tenuto gc`."),
    click.option(
        "--write-back",
        type=byte_size,
        metavar="SIZE",
        help="Let turns end before they are saved, up to so many bytes of rows. A process that is killed"
        " loses them.",
    ),
    click.option(
        "--write-back-age",
        type=duration,
        default="5s",
        show_default=True,
        metavar="AGE",
        help="Save turns before they end while one waits for so long.",
    ),
)


def keeping_options(function: Command) -> Command:
    """Adds them; the command takes them as `keeping: Keeping`."""

    @functools.wraps(function)
    def command(*args: Any, sweep: float, no_sweep: bool, **kwargs: Any) -> Any:
        said = {name: kwargs.pop(name) for name in ("quota", "tenants", "write_back", "write_back_age")}
        keeping = Keeping(sweep=None if no_sweep else sweep, **said)
        return function(*args, keeping=keeping, **kwargs)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command

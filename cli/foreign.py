"""What is said of files of other programs: options, folded into one argument."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.options import Command
from engine.errors import UsageError

if TYPE_CHECKING:
    from sessions.migrate.export import Exported
    from sessions.migrate.foreign import ForeignFiles, OpenEngine, Told
    from sessions.migrate.imports import Examined

#: `sessions.migrate.export.FORMATS` and `serialization.foreign.readers.Kind`, which take long to import.
FORMATS = ("llama", "llama-slot", "llama-session", "llama-blob", "transformers")
KINDS = ("llama.cpp", "mlx-lm", "transformers")


@dataclass(frozen=True, slots=True)
class ForeignSaid:
    """What was said. `rotated`: whether quantized rows are Hadamard-rotated, None where nobody said."""

    format: str | None
    kind: str | None
    tokens: str | None
    sequence: int | None
    rotated: bool | None
    trust: bool
    reread: bool
    flash_attention: bool

    def files(
        self, opening: OpenEngine, told: Told, type_k: str | None = None, type_v: str | None = None
    ) -> ForeignFiles:
        """What reads and writes such files. `type_k` and `type_v` are of what is written. Raises UsageError
        for a file of tokens that is none."""
        from serialization.foreign.foreign_state import Rotation
        from serialization.foreign.readers import Kind
        from sessions.migrate.export import Shape
        from sessions.migrate.foreign import ForeignFiles
        from sessions.migrate.imports import Taking, Wish

        if self.trust and self.reread:
            raise UsageError("either --trust or --reread")
        rotations = {None: None, True: Rotation.ROTATED, False: Rotation.NONE}
        rotation = rotations[self.rotated]
        return ForeignFiles(
            opening,
            Wish(
                tokens=None if self.tokens is None else read_tokens(self.tokens),
                rotation=rotation,
                taking=Taking.TRUSTED if self.trust else Taking.REREAD if self.reread else Taking.PROVEN,
            ),
            self.sequence,
            None if self.kind is None else Kind(self.kind),
            self.format or "llama",
            Shape(type_k, type_v, self.flash_attention, rotation or Rotation.ROTATED),
            told,
        )


_OPTIONS = (
    click.option(
        "--to", "format", type=click.Choice(FORMATS), help="DST is a file of another program, in this format."
    ),
    click.option("--from", "kind", type=click.Choice(KINDS), help="What wrote SRC, where it does not say."),
    click.option(
        "--tokens",
        metavar="FILE",
        help="The token ids of SRC, where it has none: a JSON list, or numbers between spaces.",
    ),
    click.option("--sequence", type=click.IntRange(min=0), metavar="N", help="Which sequence of SRC."),
    click.option(
        "--rotated/--unrotated",
        default=None,
        help="Whether quantized rows of a foreign file are Hadamard-rotated (else it is found out).",
    ),
    click.option(
        "--trust", is_flag=True, help="Take rows that nothing can prove; the session says so for ever."
    ),
    click.option("--reread", is_flag=True, help="Take the token ids alone: the model reads them anew."),
    click.option(
        "--flash-attention/--no-flash-attention",
        default=True,
        help="How the program that reads DST is set up (values lie transposed without).",
    ),
)


def foreign_options(function: Command) -> Command:
    """Adds the options; the command takes what was given as `foreign: ForeignSaid`."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        said = ForeignSaid(**{name: kwargs.pop(name) for name in ForeignSaid.__dataclass_fields__})
        return function(*args, foreign=said, **kwargs)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_tokens(path: str) -> tuple[int, ...]:
    """Raises UsageError for a file that holds no list of ids."""
    try:
        text = Path(path).expanduser().read_text("utf-8")
        ids: Sequence[object] = json.loads(text) if text.lstrip()[:1] == "[" else list(map(int, text.split()))
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no list of token ids: {error}") from None
    if not all(type(each) is int and 0 <= each < 2**31 for each in ids):
        raise UsageError(f"{path} is no list of token ids: a JSON list of numbers, or numbers between spaces")
    return tuple(each for each in ids if isinstance(each, int))


def words_of_import(examined: Examined) -> str:
    """What came of the proof, for people."""
    if examined.proof is not None:
        proof = examined.proof
        last = "last row" if proof.num_rows == 1 else f"last {proof.num_rows} rows"
        return (
            f"the model computed the {last} again: within {proof.worst.drift:.2g} of the"
            f" file's ({proof.limit:g} at most)"
        )
    if examined.rows is None:
        return f"the model reads {examined.num_read:,} tokens anew"
    return "nothing proved that this model made these rows: the session is marked `unverified`"


def words_of_export(exported: Exported) -> str:
    """What who reads the file has to know."""
    follows = "" if exported.pending is None else f"; token {exported.pending} follows, and is decoded first"
    return f"for {exported.read_by}, with {exported.settings}{follows}"

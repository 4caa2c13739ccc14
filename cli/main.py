"""`tenuto`: the command line. Here, and nowhere else, errors become exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence

import click

from cli.app import Flags
from cli.chat import chat
from cli.check import check
from cli.completion import completion
from cli.diff import diff
from cli.erase import erase
from cli.export import export
from cli.fork import fork
from cli.gc import gc
from cli.import_ import import_
from cli.inspect import inspect
from cli.keys import keys
from cli.load import load
from cli.ls import ls
from cli.migrate import migrate
from cli.models import models
from cli.options import debug_option, quiet_option
from cli.ordered import Ordered
from cli.output import one_line
from cli.pull import pull
from cli.rename import rename
from cli.resume import resume
from cli.rewind import rewind
from cli.rm import rm
from cli.run import run
from cli.save import save
from cli.serve import serve
from cli.show import show
from cli.stats import stats
from cli.top import top
from cli.verify import verify
from engine.errors import TenutoError
from engine.parallel.world import World

#: Beside those of the error classes (engine/errors.py).
INTERRUPTED = 130

COMMANDS = (
    chat,
    run,
    resume,
    save,
    load,
    ls,
    show,
    fork,
    rewind,
    rename,
    rm,
    export,
    import_,
    migrate,
    inspect,
    diff,
    verify,
    check,
    gc,
    stats,
    keys,
    erase,
    pull,
    models,
    serve,
    top,
    completion,
)


@click.group(cls=Ordered, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tenuto", prog_name="tenuto")
@quiet_option
@debug_option
def tenuto() -> None:
    """Conversations with a language model that survive: close one today, and it goes on tomorrow
    without reading its past again.

    Start with `tenuto chat`; come back with `tenuto chat -c`.
    """


for _command in COMMANDS:
    tenuto.add_command(_command)


def execute(arguments: Sequence[str]) -> int:
    """Run one command line. Returns its exit code; an error is one line on stderr."""
    flags = Flags()
    try:
        code = tenuto.main(list(arguments), prog_name="tenuto", standalone_mode=False, obj=flags)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _fail(error, _hinted(error), error.exit_code, flags)
    except click.Abort:
        return INTERRUPTED
    except TenutoError as error:
        return _fail(error, str(error), error.exit_code, flags)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(error, f"{where}{error.strerror or error}", TenutoError.exit_code, flags)
    except Exception as error:
        text = f"a bug of ours, {type(error).__name__}: {error} (--debug shows where)"
        return _fail(error, text, TenutoError.exit_code, flags)


def _hinted(error: click.ClickException) -> str:
    """What was wrong, and which help tells what is right."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return f"{error.format_message()}{hint}"


def _fail(error: Exception, text: str, code: int, flags: Flags) -> int:
    with contextlib.suppress(OSError):  # that stdout is full or gone may be the very error
        sys.stdout.flush()
    if flags.debug:
        traceback.print_exception(error)
    print(f"tenuto: {one_line(text)}", file=sys.stderr)
    return code


def main() -> None:
    _settle_streams()
    world = World.of(os.environ)
    if world is not None and world.rank > 0:
        sys.exit(_follow(world))
    code = execute(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; libraries would answer with a traceback
    sys.exit(_flushed(code))


def _follow(world: World) -> int:
    """One of torchrun's processes: the first has the command line, the terminal and the store."""
    from engine.parallel.follower import follow_torchrun

    return follow_torchrun(world)


def _settle_streams() -> None:
    """Streams that were closed become empty ones. Text that is not in their encoding is replaced: a reply
    must not end for a character that this terminal cannot show."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open to the end)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _flushed(code: int) -> int:
    """`code`, or that of an error which only the last words to stdout met (a full disk behind it)."""
    try:
        sys.stdout.flush()
    except OSError as error:
        broken = isinstance(error, BrokenPipeError)  # the reader has what it wanted
        if not broken:
            print(f"tenuto: stdout: {error.strerror}", file=sys.stderr)
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python tries once more, and complains
        return code if broken or code else TenutoError.exit_code
    return code


if __name__ == "__main__":
    main()

"""A migration on the terminal: what is planned, how far it is, and what was done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from cli.output import Output, counted, size

if TYPE_CHECKING:
    from sessions.migrate.moved import Moved, Progress, Told
    from sessions.migrate.plan import Item, Plan

#: Problems of which a person is told.
_TOLD = 20


@contextmanager
def progress_bar(out: Output) -> Iterator[Told]:
    """A bar on stderr, where that is a terminal, for as long as the block takes."""
    console = Console(stderr=True)
    unseen = out.quiet or not console.is_terminal
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[written]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=unseen, transient=True) as bar:
        task = bar.add_task("sessions", total=None, written="")

        def told(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, written=size(progress.nbytes))

        yield told


def tell_plan(out: Output, plan: Plan, named: bool) -> None:
    """For people; `named` says whose it is."""
    whose = f" of {plan.tenant}" if named else ""
    out.text(f"from {plan.source} to {plan.target}{whose}: {_amount(plan)}")
    for item in plan.items:
        out.text(f"  {item.fate}: {_count(item)}; {item.why}")
        for example in item.examples:
            out.text(f"    {example}")
    for clash in plan.clashes[:_TOLD]:
        out.text(f"  clash: {clash}")
    if plan.clashes:
        out.text(
            f"  {len(plan.clashes):,} clash, so that nothing is moved; --skip leaves them out, --rename finds"
            " them another place"
        )


def _amount(plan: Plan) -> str:
    return f"{counted(plan.num_sessions, 'session')}, about {size(plan.nbytes)}"


def _count(item: Item) -> str:
    return f"{item.what}, {item.count:,}" + ("" if item.nbytes is None else f" ({size(item.nbytes)})")


def tell_moved(out: Output, moved: Moved) -> None:
    """For people: the id of a session that was made on stdout, the rest as remarks."""
    if moved.session is not None:
        out.text(moved.session)
    told: list[tuple[int, str]] = [
        (moved.before, "were there already"),
        (moved.ahead, "went on there, and were left as they are"),
        (moved.gone, "were moved before and deleted there: left out"),
        (moved.skipped, "had something else in their place"),
        (moved.expired, "were lost by the source itself: their time was over"),
        (moved.again, "went on while they were moved, and were moved again"),
        (moved.lost_blobs, "blobs of rows had expired in the source: those tokens are read again"),
        (len(moved.writing), "are being written to in the source now: what is said there stays there"),
    ]
    pins = f" and {counted(moved.num_pins, 'kept turn')}" if moved.num_pins else ""
    out.note(f"moved {counted(moved.num_sessions, 'session')}{pins}, {size(moved.nbytes)}")
    for number, words in told:
        if number:
            out.note(f"  {number:,} {words}")
    for problem in moved.problems[:_TOLD]:
        out.warn(f"{problem.ref}: {problem.message}")
    if len(moved.problems) > _TOLD:
        out.warn(f"and {len(moved.problems) - _TOLD:,} more (--json tells all)")

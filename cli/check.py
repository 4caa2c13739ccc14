"""`tenuto check`: is everything there, and as it was written?"""

from __future__ import annotations

from dataclasses import asdict

import click

from cli.app import App
from cli.options import with_app
from cli.output import size
from engine.errors import ProblemsFound


@click.command()
@click.option("--repair", is_flag=True, help="Mend what can be mended, and say what was done.")
@with_app
def check(app: App, repair: bool) -> None:
    """Read every stored byte and tell what is wrong. Changes nothing, unless --repair is given.

    A repair rebuilds a damaged index from the manifests, and gives up damaged rows; text and token ids
    stay, and the next resume reads them again. What a newer tenuto stored is told, and left alone.
    """
    manager = app.manager()
    report = manager.repair() if repair else manager.check()
    if app.out.as_json:
        app.out.data(asdict(report))
    else:
        for line in report.repaired:
            app.out.text(f"repaired: {line}")
        for problem in report.problems:
            app.out.text(f"{problem.kind}: {problem.where}: {problem.message}")
        app.out.note(
            f"{report.num_sessions} sessions, {report.num_blobs} blobs, {size(report.nbytes)} read; "
            f"{report.orphans} that nothing needs (gc takes those older than its grace)"
            + (f", {report.expired} expired" if report.expired else "")
        )
    if report.problems:
        more = "" if repair else "; `tenuto check --repair` mends what it can"
        raise ProblemsFound(f"{len(report.problems)} problems found{more}")

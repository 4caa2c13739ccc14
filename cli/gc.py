"""`tenuto gc`: free what nothing needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cli.app import App
from cli.options import with_app
from cli.output import size
from cli.retention import duration, retention_options

if TYPE_CHECKING:
    from sessions.gc import GcPlan


@click.command()
@click.option("-n", "--dry-run", is_flag=True, help="Say what would go; delete nothing.")
@click.option(
    "--grace",
    type=duration,
    metavar="AGE",
    help="Spare blobs younger than this, which a save may still need (default: 1h).",
)
@retention_options
@with_app
def gc(app: App, dry_run: bool, grace: float | None, retention: dict[str, object]) -> None:
    """Delete stored blobs that no session needs, and what has outlived its time or budget."""
    if grace is not None:
        retention = {**retention, "grace": grace, "lease": min(30.0, grace / 2)}
    manager = app.manager(policy=retention)
    plan = manager.plan_gc()
    if dry_run:
        if app.out.as_json:
            blobs = [{"blob": info.blob, "nbytes": info.nbytes} for info in plan.blobs]
            app.out.data(
                {
                    "expired": list(plan.expired),
                    "released": list(plan.released),
                    "blobs": blobs,
                    "nbytes": plan.nbytes,
                    "later_nbytes": plan.later_nbytes,
                }
            )
            return
        for session in plan.expired:
            app.out.text(f"would delete session {session}")
        for session in plan.released:
            app.out.text(f"would give up the rows of session {session}")
        app.out.text(f"would free {len(plan.blobs)} blobs, {size(plan.nbytes)}{_later(plan, 'would be')}")
        return
    result = manager.collect(plan)
    if app.out.as_json:
        app.out.data(asdict(result))
        return
    for session in result.skipped:
        app.out.warn(f"session {session} is being written to and was left alone")
    app.out.note(
        f"freed {result.num_blobs} blobs, {size(result.nbytes)}; deleted {len(result.expired)} sessions, "
        f"gave up the rows of {len(result.released)}{_later(plan, 'are')}"
    )


def _later(plan: GcPlan, verb: str) -> str:
    """What those sessions had is freed by the next run, since this one looked while they had it."""
    return f"; {size(plan.later_nbytes)} of these {verb} freed by the next gc" if plan.later_nbytes else ""

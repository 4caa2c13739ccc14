"""`tenuto verify`: does the model still say what the stored rows say?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from cli.app import App
from cli.arguments import complete_session
from cli.options import EngineOptions, engine_options, with_app
from cli.output import counted
from engine.errors import Drifted, UsageError

if TYPE_CHECKING:
    from serialization.manifest import Manifest
    from sessions.drift import Drift
    from sessions.verify import PartDrift, Verification

#: Parts of which a person is told: those that are furthest apart.
_WORST = 5


@click.command()
@click.argument("session", metavar="SESSION", shell_complete=complete_session)
@click.option(
    "--logits",
    "count",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="At how many lengths it is asked what follows.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Which lengths.")
@click.option(
    "--drift",
    "limit",
    type=click.FloatRange(min=0),
    help="The largest |difference| of logits that is no drift (3, as for a resume by another build).",
)
@engine_options
@with_app
def verify(app: App, session: str, count: int, seed: int, limit: float | None, engine: EngineOptions) -> None:
    """Read SESSION's token ids again with the model, and hold its stored rows against what comes of it.

    Checksums prove bytes; this proves meaning. At N lengths, drawn evenly by --seed among those that the
    stored state can be resumed at, the logits of what follows are compared: of the stored rows, and of the
    tokens read from the start. So are all rows below the last of them, and what was recorded of the logits
    when the session was saved. SESSION may be SESSION@TURN or pin:NAME, too.

    Ends with code 59 where logits are further apart than --drift. Needs the time to read the session once,
    and changes nothing.
    """
    from cli.loading import load
    from sessions.named_turn import named_turn
    from sessions.policy import Policy
    from sessions.verify import verify as ask

    if engine.draft is not None:
        raise UsageError("verify asks the model itself, and not what guesses for it: without --draft")
    manifest = named_turn(app.store, session)
    model = load(with_room(engine, manifest), manifest, app.out)
    limit = Policy().drift if limit is None else limit
    found = ask(model, app.store, manifest, count, limit, seed)
    if app.out.as_json:
        app.out.data(as_data(found))
    else:
        tell(app, found)
    if found.drifted:
        raise Drifted(f"session {found.session}: {_verdict(found)}")


def with_room(engine: EngineOptions, manifest: Manifest) -> EngineOptions:
    """Room for the session twice: as it is stored, and as it is read anew."""
    needed = {"num_seqs": 2, "num_cells": 2 * (manifest.length + 1)}
    return replace(engine, config={**needed, **engine.config})


def _verdict(found: Verification) -> str:
    worst = sum(found.drifts, start=type(found.rows)())
    what = "drifted" if found.drifted else "no drift"
    return f"{what}: logits differ by up to {_figure(worst.max)}, {found.limit:g} is allowed"


def tell(app: App, found: Verification) -> None:
    """For people."""
    app.out.text(
        f"session {found.session}, turn {found.turn}: asked at {counted(len(found.samples), 'length')} of"
        f" {found.num_lengths:,} that could be asked, drawn by seed {found.seed}"
    )
    rows = [
        [
            f"{sample.length:,}",
            _figure(sample.logits.max),
            _figure(sample.logits.mean),
            str(sample.stored_top),
            "yes" if sample.agrees else f"no, {sample.computed_top}",
        ]
        for sample in found.samples
    ]
    if rows:
        app.out.table([">LENGTH", ">MAX", ">MEAN", ">TOP", "THE SAME ANEW"], rows)
    if found.recorded is not None:
        logits = counted(found.recorded.num_values, "logit")
        app.out.text(f"recorded when it was saved, {logits}: {_drift(found.recorded)}")
    _tell_parts(app, found.parts)
    if found.making:
        app.out.text(f"made with another {', '.join(found.making)}")
    for line in found.unasked:
        app.out.warn(line)
    app.out.text(_verdict(found))


def _tell_parts(app: App, parts: tuple[PartDrift, ...]) -> None:
    seen = [part for part in parts if part.num_rows]
    same = sum(part.drift.num_differing == 0 for part in seen)
    app.out.text(f"rows of {counted(len(seen), 'part')}: {same} the same bit for bit")
    apart = [part for part in seen if part.drift.num_differing]
    apart.sort(key=lambda part: math.inf if math.isnan(part.drift.max) else part.drift.max, reverse=True)
    for part in apart[:_WORST]:
        share = part.drift.num_differing / part.drift.num_values
        app.out.text(f"  {part.name} ({part.dtype}): {_drift(part.drift)}, {share:.0%} of its values differ")


def _drift(drift: Drift) -> str:
    return f"max {_figure(drift.max)}, mean {_figure(drift.mean)}"


def _figure(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not a number"


def as_data(found: Verification) -> dict[str, Any]:
    """For programs."""
    return {
        "session": found.session,
        "turn": found.turn,
        "tokens": found.num_tokens,
        "positions": {
            "chosen": "evenly, without repetition, among the lengths that can be resumed",
            "seed": found.seed,
            "of": found.num_lengths,
        },
        "samples": [
            {
                "length": sample.length,
                **_drift_data(sample.logits),
                "stored_top": sample.stored_top,
                "computed_top": sample.computed_top,
                "top1_agrees": sample.agrees,
            }
            for sample in found.samples
        ],
        "top1_agreement": _share(found),
        "recorded": None if found.recorded is None else _drift_data(found.recorded),
        "rows": _drift_data(found.rows),
        "parts": [
            {
                "name": part.name,
                "kind": part.kind,
                "dtype": part.dtype,
                "rows": part.num_rows,
                **_drift_data(part.drift),
            }
            for part in found.parts
        ],
        "other_making": list(found.making),
        "unasked": list(found.unasked),
        "limit": found.limit,
        "verdict": "drifted" if found.drifted else "sound",
    }


def _share(found: Verification) -> float | None:
    return sum(sample.agrees for sample in found.samples) / len(found.samples) if found.samples else None


def _drift_data(drift: Drift) -> dict[str, float | int | None]:
    """What is no number is null in JSON."""
    return {
        "max": drift.max if math.isfinite(drift.max) else None,
        "mean": drift.mean if math.isfinite(drift.mean) else None,
        "values": drift.num_values,
        "differing": drift.num_differing,
    }

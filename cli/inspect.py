"""`tenuto inspect`: what a session is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from cli.app import App
from cli.arguments import session_argument
from cli.layout import layout_line
from cli.options import with_app
from cli.output import moment, size
from serialization.blobs import short

if TYPE_CHECKING:
    from serialization.losses import Loss
    from serialization.manifest import Manifest
    from serialization.refs import ChunkRef


@click.command()
@session_argument
@with_app
def inspect(app: App, session: str) -> None:
    """Print the manifest of SESSION: its fingerprint, layout, chunks, checkpoints, edge and sampler.

    With --json also every token id and the name of every blob.
    """
    manifest = app.manager().manifest(session)
    if app.out.as_json:
        app.out.data(_as_data(manifest))
        return
    for key, value in _facts(manifest):
        app.out.text(f"{key:<14}{value}")
    for half, values in (
        ("meaning", manifest.fingerprint.meaning),
        ("making", manifest.fingerprint.making),
    ):
        app.out.text()
        app.out.text(f"fingerprint, {half}")
        for field, fact in sorted(values.items()):
            app.out.text(f"  {field} = {fact}")
    app.out.text()
    rows = [[str(i), f"{c.start:,}", f"{c.stop:,}", _blobs(c)] for i, c in enumerate(manifest.chunks)]
    app.out.table([">CHUNK", ">FROM", ">TO", "BLOBS"], rows)


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    origin = manifest.forked_from
    blobs = list(manifest.blobs())
    return [
        ("session", manifest.session),
        ("generation", str(manifest.generation)),
        ("saved", moment(manifest.updated)),
        ("forked from", f"{origin.session} at {origin.length:,} tokens" if origin else "-"),
        ("model", manifest.model),
        ("template", manifest.template or "-"),
        ("tokens", f"{manifest.length:,}"),
        ("rows", ", ".join(f"[{s.start:,}, {s.stop:,}) {s.provenance}" for s in manifest.spans) or "-"),
        *(("from", each) for each in _brought(manifest)),
        *(("re-encoded", _told_loss(loss)) for loss in manifest.reencoded),
        ("layout", layout_line(manifest.layout)),
        ("blobs", f"{len(blobs)}, {size(sum(ref.nbytes for ref in blobs))}"),
        ("checkpoints", ", ".join(f"{point.position:,}" for point in manifest.checkpoints) or "-"),
        ("draft", _draft(manifest)),
        ("edge", type(manifest.edge).__name__ if manifest.edge is not None else "-"),
        ("sampler", _sampler(manifest)),
        ("features", ", ".join(manifest.features) or "-"),
    ]


def _brought(manifest: Manifest) -> Iterator[str]:
    """Where it came from, and how it is known that the rows are the model's."""
    brought = manifest.brought
    if brought is None:
        return
    proven = {
        "rows": f"proven by its last rows, {brought.drift or 0:.2g} apart",
        "reread": "its tokens were read anew",
        "unverified": "unverified",
    }[brought.proven]
    loss = f"; converted with a loss of {brought.loss:.2%}" if brought.loss else ""
    yield f"{brought.source}: {proven}{loss}"


def _told_loss(loss: Loss) -> str:
    """What a conversion has cost, in one line."""
    pairs = sorted({(part.before, part.after) for part in loss.parts})
    words = ", ".join(f"{before} to {after}" for before, after in pairs)
    if loss.is_exact:
        return f"{words} at {loss.length:,} tokens: exact"
    worst = max(part.greatest for part in loss.parts)
    mean = max(part.mean_square for part in loss.parts) ** 0.5
    return f"{words} at {loss.length:,} tokens: worst row {worst:.2%}, worst part {mean:.2%}"


def _draft(manifest: Manifest) -> str:
    draft = manifest.draft
    if draft is None:
        return "-"
    own = manifest.of_draft()
    nbytes = sum(ref.nbytes for ref in manifest.blobs() if ref.blob in own)
    return f"{draft.length:,} tokens, {len(own)} blobs, {size(nbytes)}: {layout_line(draft.layout)}"


def _sampler(manifest: Manifest) -> str:
    sampler = manifest.sampler
    return (
        f"temperature {sampler.temperature:g}, top-k {sampler.top_k}, top-p {sampler.top_p:g}, "
        f"min-p {sampler.min_p:g}, repeat penalty {sampler.repeat_penalty:g}, seed {sampler.seed}"
    )


def _blobs(chunk: ChunkRef) -> str:
    return ", ".join(f"{b.kind} {short(b.ref.blob)} {size(b.ref.nbytes)}" for b in chunk.blobs)


def _as_data(manifest: Manifest) -> dict[str, Any]:
    data = {key: _plain(getattr(manifest, key)) for key in type(manifest).__dataclass_fields__}
    return {**data, "features": list(manifest.features), "length": manifest.length}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(item) for key, item in asdict(value).items()}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

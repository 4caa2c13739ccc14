"""`tenuto pull`: fetch a model."""

from __future__ import annotations

import click

from cli.fetching import fetch_with_progress
from cli.options import with_output
from cli.output import Output, size


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="MODEL...")
@with_output
def pull(out: Output, names: tuple[str, ...]) -> None:
    """Fetch each MODEL of `tenuto models` into the cache folder, check its digest, and print its path.

    A download that was cut off goes on where it stopped; what is there already is not fetched again.
    """
    from engine.weights.catalog import find

    entries = [find(name) for name in names]  # refuse a wrong name before the first download
    paths = []
    for entry in entries:
        path = fetch_with_progress(entry.name, out)
        paths.append(
            {"name": entry.name, "path": str(path), "nbytes": path.stat().st_size, "license": entry.license}
        )
        if not out.as_json:
            out.note(f"{entry.title}: {size(path.stat().st_size)}")
            out.note(entry.license)
            out.text(str(path)) if not out.quiet else None
    if out.as_json:
        out.data(paths)

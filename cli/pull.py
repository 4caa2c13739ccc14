"""`tenuto pull`: fetch a model."""

from __future__ import annotations

import click

from cli.fetching import fetch_with_progress
from cli.folders import models_folder
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
    from engine.weights.fetch import notices

    entries = [find(name) for name in names]  # a wrong name is refused before the first download
    pulled = []
    for entry in entries:
        path = fetch_with_progress(entry.name, out)
        terms = [str(notice) for notice in notices(entry.name, models_folder())]
        pulled.append(
            {
                "name": entry.name,
                "path": str(path),
                "nbytes": entry.nbytes,
                "license": entry.license,
                "notices": terms,
            }
        )
        if not out.as_json:
            out.note(f"{entry.title}, {size(entry.nbytes)}. {entry.license}")
            for notice in terms:
                out.note(f"  {notice}")
            out.text(str(path))
    if out.as_json:
        out.data(pulled)

"""`tenuto models`: what there is to talk with."""

from __future__ import annotations

import click

from cli.app import models_folder
from cli.options import with_output
from cli.output import Output, size


@click.command()
@with_output
def models(out: Output) -> None:
    """List the models that `pull` knows, which of them are here, and the families that can be loaded."""
    from engine.weights.catalog import CATALOG
    from engine.weights.fetch import fetched

    from engine.models.table import MODELS

    rows = []
    for entry in CATALOG.values():
        path = fetched(entry.name, models_folder())
        rows.append(
            {
                "name": entry.name,
                "title": entry.title,
                "nbytes": entry.nbytes,
                "license": entry.license,
                "path": str(path) if path else None,
            }
        )
    if out.as_json:
        out.data({"models": rows, "architectures": sorted(MODELS)})
        return
    table = [[r["name"], r["title"], size(r["nbytes"]), "yes" if r["path"] else "no"] for r in rows]
    out.table(["NAME", "MODEL", ">SIZE", "HERE"], table)
    out.text()
    families = ", ".join(sorted(MODELS))
    out.text(f"A GGUF file or a Hugging Face folder of these families works too: {families}")

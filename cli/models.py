"""`tenuto models`: what there is to talk with."""

from __future__ import annotations

import click

from cli.folders import models_folder
from cli.options import with_output
from cli.output import Output, size


@click.command()
@with_output
def models(out: Output) -> None:
    """List the models that `pull` knows, which of them are here, and the families that can be loaded."""
    from engine.models.table import GGUF_NAMED, HUB_NAMED
    from engine.weights.catalog import CATALOG
    from engine.weights.fetch import fetched

    here = {name: fetched(name, models_folder()) for name in CATALOG}
    if out.as_json:
        listed = [
            {
                "name": entry.name,
                "title": entry.title,
                "nbytes": entry.nbytes,
                "license": entry.license,
                "path": str(here[entry.name]) if here[entry.name] else None,
            }
            for entry in CATALOG.values()
        ]
        out.data({"models": listed, "gguf": sorted(GGUF_NAMED), "folders": sorted({*GGUF_NAMED, *HUB_NAMED})})
        return
    rows = [[e.name, e.title, size(e.nbytes), "yes" if here[e.name] else "no"] for e in CATALOG.values()]
    out.table(["NAME", "MODEL", ">SIZE", "HERE"], rows)
    out.text()
    out.text(f"A GGUF file, or a Hugging Face folder, works too of: {', '.join(sorted(GGUF_NAMED))}")
    out.text(f"A Hugging Face folder of these, by its model_type: {', '.join(sorted(HUB_NAMED))}")

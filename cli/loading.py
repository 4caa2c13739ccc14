"""From what was said about a model to a running engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from cli.fetching import fetch_with_progress
from cli.files import named_file
from cli.folders import cache_folder, models_folder
from cli.known import KnownModels
from cli.options import EngineOptions
from cli.output import Output, size
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.runner import Engine
    from engine.speculative.choice import Draft
    from serialization.manifest import Manifest

DEFAULT_MODEL = "smollm2"

#: settings that decide what stored rows mean; a resume takes them from the session if nothing else is said
_INHERITED = ("type_k", "type_v")


def load(options: EngineOptions, manifest: Manifest | None, out: Output) -> Engine:
    """The engine for `options`; what they leave open is taken from the session, if there is one.

    Raises ModelNotFound, DownloadFailed, UnknownArchitecture, WeightsRefused, ConfigError, DeviceMissing,
    RankLost.
    """
    from engine.config import EngineConfig
    from engine.loader import load_engine
    from engine.parallel.world import World

    known = KnownModels(cache_folder() / "known-models.json")
    model, template = options.model, options.chat_template
    config = dict(options.config)
    if manifest is not None:
        meaning = manifest.fingerprint.meaning
        if model is None:
            model = known.model(str(meaning.get("weights")))
        if template is None:
            template = known.template(manifest.template)
        config = {**{key: meaning[key] for key in _INHERITED if key in meaning}, **config}
    model = model or DEFAULT_MODEL
    world = World.of(os.environ)
    if world is not None:
        config = {"tp": world.size, **config}
    engine = load_engine(
        locate(model, out),
        EngineConfig.from_mapping(config),
        template,
        cache_folder() / "tokenizers",
        _draft(options, out),
        world,
    )
    # Other ranks are let go with the command; they would be with this process.
    click.get_current_context().call_on_close(engine.end)
    known.remember(
        str(engine.fingerprint.meaning.get("weights")),
        model,
        engine.template.digest if engine.template is not None else None,
        template,
    )
    return engine


def _draft(options: EngineOptions, out: Output) -> Draft | None:
    """Raises UsageError for a number of guesses where nothing guesses."""
    from engine.speculative.choice import MTP, NGRAM, Draft

    if options.draft is None:
        if options.draft_max is not None:
            raise UsageError("--draft-max needs --draft, which says what guesses")
        return None
    source = options.draft if options.draft in (NGRAM, MTP) else locate(options.draft, out)
    return Draft(source, options.draft_max)


def locate(model: str, out: Output) -> str:
    """Where `model` is; one of the catalogue is fetched first, if it is not there yet."""
    from engine.weights.catalog import CATALOG, find
    from engine.weights.fetch import fetched

    path = named_file(model)
    if model not in CATALOG:
        if not path.exists() and os.sep not in model and not path.suffix:
            find(model)  # raises ModelNotFound, with the names there are
        return model if model.startswith("hf:") else str(path)
    if fetched(model, models_folder()) is None:
        entry = CATALOG[model]
        out.note(f"fetching {entry.title}, {size(entry.nbytes)}, once. {entry.license}")
    return str(fetch_with_progress(model, out))

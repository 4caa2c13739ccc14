"""From a model's path to a running engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.builtin_templates import BUILTIN_TEMPLATES
from engine.config import EngineConfig, probe_machine, resolve
from engine.errors import ConfigError, ModelNotFound
from engine.fingerprint import Source
from engine.models.base import Model, Placement
from engine.models.decoder import Decoder
from engine.models.mtp import Mtp
from engine.models.table import build_model, build_mtp, context_length
from engine.parallel.lead import lead
from engine.parallel.world import World
from engine.runner import Engine
from engine.speculative import choice
from engine.speculative.choice import Draft
from engine.speculative.model_drafter import ModelDrafter
from engine.speculative.mtp import MtpDrafter
from engine.speculative.ngram import NgramDrafter
from engine.template import ChatTemplate, named_template, template_for
from engine.tokenizer import Tokenizer, open_tokenizer
from engine.weights.source import open_weights
from engine.weights.weights import Weights


def load_engine(
    source: str | Path,
    config: EngineConfig | None = None,
    chat_template: str | None = None,
    cache_dir: Path | None = None,
    draft: Draft | None = None,
    world: World | None = None,
) -> Engine:
    """The engine of the model at `source` (see `open_weights`).

    `chat_template` is the name of a built-in template or a file, in place of the model's own.
    `cache_dir` keeps built tokenizers. `draft` says what guesses the next tokens. Processes of other ranks,
    if `config` wants any, are started here, unless they are there already in `world`.
    Raises ModelNotFound, UnknownArchitecture, WeightsRefused, ConfigError, DeviceMissing, RankLost.
    """
    config = config or EngineConfig()
    if draft is not None:
        config = draft.for_target(config)
    weights = open_weights(source)
    resolved = resolve(config, context_length(weights), probe_machine())
    tokenizer = open_tokenizer(weights.tokenizer_data, cache_dir)
    template = _template(weights, tokenizer, chat_template)
    # What drafts is rank 0's alone, whatever the model's own ranks are.
    placement = Placement(resolved.dtype, resolved.device, resolved.n_ctx)
    of_weights = Source(weights.name, weights.digest)
    if resolved.tp == 1:
        model = build_model(weights, placement)
        engine = Engine(model, tokenizer, template, config, of_weights)
    else:
        ranks = lead(resolved.tp, world)
        try:
            ranks.load(source, config)
            model = build_model(weights, replace(placement, ranks=ranks.group))
            engine = Engine(model, tokenizer, template, config, of_weights, ranks)
        except BaseException:
            ranks.end()
            raise
    try:
        if draft is not None and draft.source == choice.MTP:
            _predict(engine, draft, model, build_mtp(weights, placement, model))
        elif draft is not None:
            _speculate(engine, draft, config, cache_dir)
    except BaseException:
        engine.end()
        raise
    return engine


def _speculate(engine: Engine, draft: Draft, config: EngineConfig, cache_dir: Path | None) -> None:
    """Give `engine`, made with `config`, the drafter that was asked for."""
    match draft.source:
        case choice.NGRAM:
            engine.speculate(NgramDrafter(), draft.count)
        case path:
            whole = replace(config, tp=1, threads=engine.config.threads)
            drafting = load_engine(path, draft.for_drafter(whole, engine.n_ctx), cache_dir=cache_dir)
            engine.speculate(ModelDrafter(drafting, engine), draft.count)


def _predict(engine: Engine, draft: Draft, model: Model, mtp: Mtp | None) -> None:
    """Let `mtp`, of the engine's own model, be its drafter. Raises ConfigError where there is none."""
    if mtp is None or not isinstance(model, Decoder):
        raise ConfigError(f"{engine.model_name} has no layers that predict further tokens")
    drafter = MtpDrafter(mtp, engine.config, engine.fingerprint, engine.tokenizer)
    engine.speculate(drafter, draft.count, model)


def _template(weights: Weights, tokenizer: Tokenizer, chosen: str | None) -> ChatTemplate | None:
    if chosen is None:
        source = weights.chat_template
        return None if source is None else template_for(tokenizer, source)
    if chosen in BUILTIN_TEMPLATES:
        return template_for(tokenizer, named_template(chosen))
    try:
        text = Path(chosen).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(BUILTIN_TEMPLATES))
        raise ModelNotFound(
            f"no chat template {chosen!r}: neither a readable file nor one of {known}"
        ) from error
    return template_for(tokenizer, text)

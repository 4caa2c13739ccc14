"""From a model's path to a running engine."""

from __future__ import annotations

from pathlib import Path

from engine.builtin_templates import BUILTIN_TEMPLATES
from engine.config import EngineConfig, probe_machine, resolve
from engine.errors import ModelNotFound
from engine.fingerprint import Source
from engine.models.base import Placement
from engine.models.table import build_model, context_length
from engine.runner import Engine
from engine.template import ChatTemplate, named_template, template_for
from engine.tokenizer import Tokenizer, open_tokenizer
from engine.weights.source import open_weights
from engine.weights.weights import Weights


def load_engine(
    source: str | Path,
    config: EngineConfig | None = None,
    chat_template: str | None = None,
    cache_dir: Path | None = None,
) -> Engine:
    """The engine of the model at `source` (see `open_weights`).

    `chat_template` is the name of a built-in template or a file, in place of the model's own.
    `cache_dir` keeps built tokenizers.
    Raises ModelNotFound, UnknownArchitecture, WeightsRefused, ConfigError, DeviceMissing.
    """
    config = config or EngineConfig()
    weights = open_weights(source)
    resolved = resolve(config, context_length(weights), probe_machine())
    tokenizer = open_tokenizer(weights.tokenizer_data, cache_dir)
    template = _template(weights, tokenizer, chat_template)
    model = build_model(weights, Placement(resolved.dtype, resolved.device, resolved.n_ctx))
    return Engine(model, tokenizer, template, config, Source(weights.name, weights.digest))


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

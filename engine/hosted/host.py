"""`host`: an engine of a causal model of transformers, of a known family or a class of your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.config import COMPUTE_DTYPES, EngineConfig
from engine.errors import CacheRefused, ConfigError, Unsupported
from engine.fingerprint import Source
from engine.hosted.digests import digest_of_config, digest_of_weights, making_of
from engine.hosted.geometry import Geometry
from engine.hosted.memory import HostedMemory
from engine.hosted.model import CausalModel, HostedModel
from engine.hosted.trial import trial
from engine.hosted.words import IdsOnly, read_template, read_tokenizer
from engine.runner import Engine
from engine.state import Value
from engine.template import ChatTemplate, template_for
from engine.tokenizer import Tokenizer

#: Settings that a hosted model cannot be asked for, and why.
_NOT_HERE: Mapping[str, str] = {
    "type_k": "rows are kept in the dtype that the model makes them in",
    "type_v": "rows are kept in the dtype that the model makes them in",
    "overflow": "keys of transformers cannot be turned to other positions",
    "n_keep": "keys of transformers cannot be turned to other positions",
    "n_discard": "keys of transformers cannot be turned to other positions",
    "full_windows": "the cache of transformers drops what its windows have passed",
    "keep_tail": "each sequence is computed alone",
    "rollback": "the cache of transformers keeps one state alone",
    "deterministic": "how its bits depend on how many tokens go in at once is the model's affair",
    "tp": "a model is divided where it is loaded",
}

#: What a generation config can ask for that would be given up in silence.
_CACHES = ("quantized", "offloaded", "offloaded_static", "offloaded_hybrid")


def host(
    model: CausalModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: EngineConfig | None = None,
    *,
    name: str | None = None,
    weights: str | None = None,
    chat_template: str | None = None,
) -> Engine:
    """The engine of a model that transformers has loaded, where it is and as it is: not a tensor of it is
    copied or changed. Its sequences can be kept as those of any other engine.

    `tokenizer` is the model's; without one the engine knows ids alone. `config` may say n_ctx, num_seqs,
    num_cells (tokens of all sequences together), max_batch, max_ubatch, threads, and what checkpoints may
    take.
    `name` is for people; `weights` says which weights these are, so that they need not be gone through;
    `chat_template` is the source of one in place of the tokenizer's.

    The model is tried with a few tokens first (see `trial`). Raises CacheRefused, naming the layer, for a
    model whose state cannot be held whole, ConfigError for one in training mode, Unsupported for settings and
    tokenizers that cannot be had here, TemplateRefused, WeightsRefused.
    """
    config = config or EngineConfig()
    _check_settings(config)
    hosted = HostedModel(model)
    _check_generation(model)
    found = trial(hosted)
    hosted.vocab_size = found.vocab_size
    hosted.meaning = _meaning(model, found.geometry)
    ends = _end_ids(model)
    words, template = _words(tokenizer, found.vocab_size, ends, chat_template)
    digest = digest_of_weights(model) if weights is None else weights
    source = Source(name or _name(model), digest, making_of(model))
    memory = partial(HostedMemory, found.geometry, singly=found.singly)
    return Engine(hosted, words, template, _settled(config, hosted), source, memory=memory)


def _words(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, ends: frozenset[int], chosen: str | None
) -> tuple[Tokenizer, ChatTemplate | None]:
    if tokenizer is None:
        if chosen is not None:
            raise ConfigError("a chat template needs a tokenizer, and there is none")
        return IdsOnly(vocab_size, ends), None
    words = read_tokenizer(tokenizer, ends)
    return words, read_template(tokenizer, words) if chosen is None else template_for(words, chosen)


def _check_settings(config: EngineConfig) -> None:
    for field in dataclasses.fields(config):
        why = _NOT_HERE.get(field.name)
        if why is not None and getattr(config, field.name) != field.default:
            raise Unsupported(
                f"{field.name} = {getattr(config, field.name)} for a model of transformers: {why}"
            )


def _check_generation(model: CausalModel) -> None:
    asked = getattr(model.generation_config, "cache_implementation", None)
    if asked in _CACHES:
        raise CacheRefused(
            f"the model's generation config asks for a cache that is {asked}: it cannot be held whole"
        )


def _settled(config: EngineConfig, model: HostedModel) -> EngineConfig:
    """With the device and dtype that the model has already. Raises ConfigError where others are asked for."""
    device = model.device
    dtypes = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
    dtype = dtypes.get(model.dtype)
    if dtype is None:
        raise ConfigError(f"the model computes in {model.dtype}; it can be {', '.join(COMPUTE_DTYPES)}")
    for name, asked, has in (("device", config.device, device.type), ("dtype", config.dtype, dtype)):
        if asked not in ("auto", has):
            raise ConfigError(f"{name} = {asked}: the model was loaded for {has}")
    return replace(config, device=device.type, dtype=dtype, main_gpu=device.index)


def _meaning(model: CausalModel, geometry: Geometry) -> Mapping[str, Value]:
    dtypes = sorted({spec.dtype for spec in geometry.layout})
    return {
        "host": "transformers",
        "architecture": type(model).__name__,
        "config": digest_of_config(model),
        "types": " ".join(dtypes),
    }


def _end_ids(model: CausalModel) -> frozenset[int]:
    """Those that the model's own `generate` ends at."""
    found: set[int] = set()
    for settings in (model.generation_config, model.config):
        given: Any = getattr(settings, "eos_token_id", None)
        found |= {given} if isinstance(given, int) else set(given or ())
    return frozenset(found)


def _name(model: CausalModel) -> str:
    """What it was loaded as: the last part of a path or of a name on the hub."""
    loaded = str(model.config._name_or_path or "").rstrip("/")
    return loaded.rpartition("/")[2] or type(model).__name__

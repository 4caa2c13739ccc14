"""A causal model of transformers as the engine sees one: tokens in, logits out, state in its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.utils.generic import ModelOutput

from engine.cache.memory import MemoryNeeds, View
from engine.errors import CacheRefused, ConfigError
from engine.hosted.geometry import Cache
from engine.hosted.memory import HostedView
from engine.models.base import DEFAULT_CONTEXT
from engine.state import Value

#: A PreTrainedModel that has a head for the next token, or something that is called as one.
CausalModel = Any


@dataclass(frozen=True, slots=True)
class Calling:
    """How the forward of a model is called: `cache` is the name that it takes its cache by."""

    cache: str
    positions: bool
    logits_to_keep: bool

    @classmethod
    def of(cls, model: CausalModel) -> Calling:
        """Raises CacheRefused for one that takes no cache."""
        names = _takes(model)
        if "cache_params" in names:
            name = "cache_params"
        elif "past_key_values" in names:
            name = "past_key_values"
        else:
            raise CacheRefused(
                f"the forward of {type(model).__name__} takes no cache: what it keeps is elsewhere"
            )
        return cls(name, "position_ids" in names, "logits_to_keep" in names)


def _takes(model: CausalModel) -> set[str]:
    """The names of what its forward takes; where that passes on what it does not name, of what its base
    classes take, or (it may be a wrapper of anything) the one that most models take a cache by."""
    names: set[str] = set()
    for kind in type(model).__mro__:
        forward = vars(kind).get("forward")
        if forward is None:
            continue
        parameters = inspect.signature(forward).parameters
        names |= parameters.keys()
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            return names
    return names if "cache_params" in names else names | {"past_key_values"}


class HostedModel:
    """See `models.base.Model`."""

    def __init__(self, model: CausalModel) -> None:
        """Raises CacheRefused, ConfigError for a model that cannot be hosted, as far as that is seen without
        calling it."""
        self.name = type(model).__name__
        if model.training:
            raise ConfigError(
                f"{self.name} is in training mode, in which it draws at random: call model.eval()"
            )
        if model.config.is_encoder_decoder:
            raise CacheRefused(f"{self.name} has an encoder, whose state belongs to no token of the reply")
        _check_rope(model)
        self._model = model
        self._calling = Calling.of(model)
        self._decoder = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = 0  # as many as there are logits; `trial` finds out
        self.meaning: Mapping[str, Value] = {}

    @property
    def needs(self) -> MemoryNeeds:
        return MemoryNeeds("hosted", ())

    @property
    def n_ctx_train(self) -> int:
        """What the configuration says, where it says something."""
        found = self._decoder.to_dict().get("max_position_embeddings")
        return found if isinstance(found, int) and found > 0 else DEFAULT_CONTEXT

    def empty_cache(self) -> Cache:
        return DynamicCache(config=self._decoder)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(view, HostedView), "a hosted model lives in a hosted memory"
        logits = self.call(view.sequence.cache, tokens, positions, outputs)
        view.done(tokens.tolist())
        return logits

    def call(
        self, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor
    ) -> torch.Tensor:
        """Put `tokens` at `positions` through `cache`. Float32 [outputs, vocab] logits. Raises CacheRefused
        where the model answers with another cache than it was given."""
        given: dict[str, object] = {self._calling.cache: cache}
        if self._calling.positions:
            given["position_ids"] = positions[None].to(self.device)
        if self._calling.logits_to_keep:
            # Of none there would be none to learn anything of.
            given["logits_to_keep"] = (outputs if len(outputs) else torch.zeros(1, dtype=torch.int64)).to(
                self.device
            )
        out = self._model(input_ids=tokens[None].to(self.device), use_cache=True, **given)
        if not isinstance(out, ModelOutput):
            raise CacheRefused(f"{self.name} returns a {type(out).__name__}, not a ModelOutput")
        if out.get(self._calling.cache) is not cache:
            raise CacheRefused(
                f"{self.name} does not go on with the cache that it is given: its state is elsewhere"
            )
        logits: torch.Tensor = out["logits"][0]
        if not self._calling.logits_to_keep:
            logits = logits[outputs.to(logits.device)]
        return logits[: len(outputs)].float()


def _check_rope(model: CausalModel) -> None:
    """Raises CacheRefused for frequencies that depend on what was computed before."""
    for part in (model.config, model.config.get_text_config(decoder=True)):
        for kind in _rope_types(part.to_dict().get("rope_parameters")):
            if kind == "dynamic":
                raise CacheRefused(
                    f"{type(model).__name__} has RoPE of type dynamic: its frequencies depend on the longest "
                    "sequence that was computed before"
                )


def _rope_types(parameters: object) -> list[object]:
    """Those of all layers, or of each type of layer."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [kind for value in parameters.values() for kind in _rope_types(value)]
    return [parameters.get("rope_type"), *nested]

"""Which file builds which architecture. Adding a family is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.errors import UnknownArchitecture
from engine.models.base import Model, Placement, WeightSource, read_hparams
from engine.models.gemma3 import Gemma3
from engine.models.llama import Llama

MODELS: Mapping[str, Callable[[WeightSource, Placement], Model]] = {
    "gemma3": Gemma3,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
}


def check_architecture(name: str) -> None:
    """Raises UnknownArchitecture, which names it and lists those there are."""
    if name not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise UnknownArchitecture(f"architecture {name!r} is not supported (supported: {known})")


def context_length(weights: WeightSource) -> int:
    """Tokens that the model was trained for. Raises UnknownArchitecture, WeightsRefused."""
    check_architecture(weights.architecture)
    return read_hparams(weights).n_ctx_train


def build_model(weights: WeightSource, placement: Placement) -> Model:
    """Raises UnknownArchitecture, WeightsRefused."""
    check_architecture(weights.architecture)
    return MODELS[weights.architecture](weights, placement)

"""From what a person typed to opened weights: a GGUF file, a Hugging Face folder, `hf:OWNER/REPO[/FILE]`."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelNotFound, WeightsRefused
from engine.weights.from_gguf import GgufWeights
from engine.weights.weights import Weights


def open_weights(source: str | Path) -> Weights:
    """The model at `source`, its header read and checked.

    Raises ModelNotFound where there is none, WeightsRefused where it is damaged.
    """
    path = Path(source)
    try:
        if not path.exists():
            raise ModelNotFound(f"no model at {path}")
        return GgufWeights(path)
    except OSError as error:
        raise WeightsRefused(f"{path}: {error.strerror or error}") from error

"""From what a person typed to opened weights: a GGUF file, a Hugging Face folder, `hf:OWNER/REPO[/FILE]`."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelNotFound, WeightsRefused
from engine.weights.catalog import CATALOG
from engine.weights.from_gguf import GgufWeights
from engine.weights.hf import HfWeights
from engine.weights.hf_config import ARCHITECTURES
from engine.weights.hf_folder import read_config
from engine.weights.hub import PREFIX, HubName, download
from engine.weights.hub_names import HubWeights
from engine.weights.weights import Weights


def open_weights(source: str | Path) -> Weights:
    """The model at `source`, its header read and checked; one on the hub is downloaded first.

    Raises ModelNotFound where there is none, DownloadFailed where it cannot be had, WeightsRefused where it
    is damaged.
    """
    if str(source).startswith(PREFIX):
        name = HubName.parsed(str(source))
        return _opened(download(name), name.repo.partition("/")[2])
    return _opened(Path(source), None)


def _opened(path: Path, name: str | None) -> Weights:
    """`name` is what a folder is called, if that is not in its path."""
    try:
        if path.is_dir():
            known = read_config(path).get("model_type") in ARCHITECTURES
            return HfWeights(path, name) if known else HubWeights(path, name)
        if path.exists():
            return GgufWeights(path)
    except OSError as error:
        raise WeightsRefused(f"{path}: {error.strerror or error}") from error
    fetched = ", ".join(sorted(CATALOG))
    raise ModelNotFound(f"no model at {path} (by name there are: {fetched})")

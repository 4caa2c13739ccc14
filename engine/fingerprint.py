"""What a state was made with: the meaning of its rows, and the making of their last bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.memory import KEYS, VALUES, Memory, PointSpec
from engine.config import ResolvedConfig
from engine.models.base import Model
from engine.state import Fingerprint, Value

#: Raised when this engine computes rows of the same meaning with other last bits, or draws otherwise.
#: 2: every id has noise of its own in a draw.
ENGINE_VERSION = "2"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's parts came from: its name for people, and the digest of its weights."""

    name: str
    weights_digest: str


def fingerprint(
    model: Model, memory: Memory, config: ResolvedConfig, weights_digest: str, tokenizer_digest: str
) -> Fingerprint:
    """See `Fingerprint`: digests of content, never paths or times."""
    return Fingerprint(
        meaning={
            "weights": weights_digest,
            "tokenizer": tokenizer_digest,
            **_row_types(model, config),
            "rotated_k": KEYS in memory.rotated,
            "rotated_v": VALUES in memory.rotated,
            **{f"rotated.{name}": True for name in memory.rotated if name not in (KEYS, VALUES)},
            **model.meaning,
        },
        making={
            "engine": ENGINE_VERSION,
            "torch": torch.__version__,
            "device": config.device.type,
            "processor": _processor(config.device),
            "threads": config.threads,
            "dtype": str(config.dtype).removeprefix("torch."),
            **({"deterministic": True} if config.deterministic else {}),
            **({"tp": config.tp} if config.tp > 1 else {}),
        },
    )


def _row_types(model: Model, config: ResolvedConfig) -> dict[str, Value]:
    """The dtypes of rows, as far as the model has any of them."""
    fields = {part.field for part in model.needs.parts if not isinstance(part, PointSpec)}
    types = {"type_k": config.type_k, "type_v": config.type_v}
    return {name: dtype for name, dtype in types.items() if name in fields}


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type

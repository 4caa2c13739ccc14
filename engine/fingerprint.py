"""What a state was made with: the meaning of its rows, and the making of their last bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from engine.cache.memory import KEYS, VALUES, Memory, MemoryNeeds, PointSpec
from engine.config import ResolvedConfig
from engine.models.base import Model
from engine.state import Fingerprint, Value

#: Raised when this engine computes rows of the same meaning with other last bits, or draws otherwise.
#: 2: every id has noise of its own in a draw. 3: one token over many keys takes them in parts.
ENGINE_VERSION = "3"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's parts came from: its name for people, and the digest of its weights. `making` is what
    decides its last bits beside the engine."""

    name: str
    weights_digest: str
    making: Mapping[str, Value] = field(default_factory=dict)


def row_meaning(needs: MemoryNeeds, rotated: Collection[str], type_k: str, type_v: str) -> dict[str, Value]:
    """The fields of meaning that go by the dtypes of rows, as far as the model has any of them; `rotated`
    names the parts whose rows are Hadamard-rotated."""
    fields = {part.field for part in needs.parts if not isinstance(part, PointSpec)}
    types = {"type_k": type_k, "type_v": type_v}
    return {
        **{name: dtype for name, dtype in types.items() if name in fields},
        "rotated_k": KEYS in rotated,
        "rotated_v": VALUES in rotated,
        **{f"rotated.{name}": True for name in sorted(rotated) if name not in (KEYS, VALUES)},
    }


def is_of_rows(field: str) -> bool:
    """Whether a field of meaning is one of `row_meaning`."""
    return field in ("type_k", "type_v") or field.startswith("rotated")


def fingerprint(
    model: Model, memory: Memory, config: ResolvedConfig, source: Source, tokenizer_digest: str
) -> Fingerprint:
    """See `Fingerprint`: digests of content, never paths or times."""
    return Fingerprint(
        meaning={
            "weights": source.weights_digest,
            "tokenizer": tokenizer_digest,
            **row_meaning(model.needs, memory.rotated, config.type_k, config.type_v),
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
            **source.making,
        },
    )


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type

"""What a model is to the engine, and the numbers that it is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from blake3 import blake3

from engine.cache.memory import MemoryNeeds, RowsSpec, View, WindowSpec
from engine.errors import WeightsRefused
from engine.parallel.ranks import ALONE, Ranks
from engine.state import Value

#: Tokens of a model without positions, whose configuration says no length that it was trained for.
DEFAULT_CONTEXT = 32_768


class WeightSource(Protocol):
    """Where tensors and numbers come from: a GGUF file or a folder, conventions normalised."""

    @property
    def architecture(self) -> str: ...

    @property
    def hparams(self) -> Mapping[str, object]: ...

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...


class Model(Protocol):
    """Tokens in, logits out; what must be remembered goes through the view."""

    @property
    def needs(self) -> MemoryNeeds:
        """What must be remembered: the kind of memory, and the parts of every layer."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def n_ctx_train(self) -> int:
        """Tokens that the model was trained for."""
        ...

    @property
    def meaning(self) -> Mapping[str, Value]:
        """Geometry and RoPE, for the fingerprint."""
        ...

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        """One pass over a ubatch: `tokens` and `positions` int64 [tokens], on the host.

        Returns float32 logits [outputs, vocab] of the rows that `outputs` (int64, in order) names.
        """
        ...


class Trunk(Model, Protocol):
    """A model whose forward is two steps, so that a draft can read what lies between them."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, view: View) -> torch.Tensor:
        """float32 [tokens, width]: what logits are made from, after the last norm."""
        ...

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of some rows of `hidden`."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """How a model is laid out: where, in which dtype, for sequences of up to how many tokens, and among which
    ranks. A rank has its share of what they divide, and all of the rest."""

    dtype: torch.dtype
    device: torch.device
    n_ctx: int
    ranks: Ranks = ALONE


@dataclass(frozen=True, slots=True)
class Hparams:
    """The numbers that every family here has. Sizes are in values; `scale` multiplies scores; `windows` has
    an entry per layer."""

    architecture: str
    n_ctx_train: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    ffn_width: int
    rms_eps: float
    rope_base: float
    n_rot: int
    scale: float
    windows: tuple[WindowSpec | None, ...]
    vocab_size: int


def read_hparams(weights: WeightSource) -> Hparams:
    """Raises WeightsRefused where a number is missing or makes no sense."""
    read = Reader(weights)
    return Hparams(
        architecture=weights.architecture,
        n_ctx_train=read.count("context_length"),
        num_layers=read.count("block_count"),
        width=read.count("embedding_length"),
        num_heads=read.count("attention.head_count"),
        num_kv_heads=read.count("attention.head_count_kv"),
        head_size=read.count("attention.key_length"),
        head_size_v=read.count("attention.value_length"),
        ffn_width=read.count("feed_forward_length"),
        rms_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope_base=read.number("rope.freq_base"),
        n_rot=read.count("rope.dimension_count"),
        scale=read.number("attention.scale"),
        windows=_windows(read),
        vocab_size=read.count("vocab_size"),
    )


def _windows(read: Reader) -> tuple[WindowSpec | None, ...]:
    """The window of each layer. The pattern n means: every n-th layer sees everything; 0: none does."""
    num_layers = read.count("block_count")
    if not read.has("attention.sliding_window"):
        return (None,) * num_layers
    window = WindowSpec(read.count("attention.sliding_window"))
    pattern = read.count("attention.sliding_window_pattern", 0)
    return tuple(
        None if pattern and layer % pattern == pattern - 1 else window for layer in range(num_layers)
    )


class Reader:
    """Hyperparameters by their keys, as numbers and words. Their ranges were checked when they were read."""

    def __init__(self, weights: WeightSource) -> None:
        self._values = weights.hparams

    def has(self, key: str) -> bool:
        return key in self._values

    def count(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise WeightsRefused(f"the model's {key} is {value!r}, not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsRefused(f"the model's {key} is {value!r}, not a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise WeightsRefused(f"the model's {key} is {value!r}, not a word")
        return value


def describe(hp: Hparams, needs: MemoryNeeds) -> Mapping[str, Value]:
    """The geometry as a fingerprint has it: what decides what a cached row means.

    Frequencies go in by their bytes, so that no way of stretching them goes unnoticed; the base stands
    beside them for the reader of an error.
    """
    windows = []
    for window in hp.windows:
        kind = "" if window is None else "c" if window.chunked else "s"
        windows.append("full" if window is None else f"{kind}{window.size}")
    return {
        "architecture": hp.architecture,
        "layers": hp.num_layers,
        "width": hp.width,
        "heads": hp.num_heads,
        "kv_heads": hp.num_kv_heads,
        "head_size_k": hp.head_size,
        "head_size_v": hp.head_size_v,
        "attention.scale": hp.scale,
        "rope.base": hp.rope_base,
        "rope.n_rot": hp.n_rot,
        "rope.frequencies": digest_of_frequencies(needs),
        "windows": " ".join(windows),
    }


def digest_of_frequencies(needs: MemoryNeeds) -> str:
    """Of every rotary that turned keys which are kept: no way of stretching frequencies goes unnoticed."""
    frequencies = blake3()
    for part in needs.parts:
        if isinstance(part, RowsSpec) and part.turned is not None:
            frequencies.update(part.turned.rotary.inv_freq.numpy().tobytes())
            frequencies.update(repr(part.turned.rotary.magnitude).encode())
    return frequencies.hexdigest(length=16)

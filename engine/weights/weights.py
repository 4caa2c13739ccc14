"""`Weights`: what an engine asks of a model file, whatever its format.

Conventions, the same for every source:

- Tensor names are GGUF's (`blk.0.attn_q.weight`), shapes are torch's: a matrix is [out, in].
- Rows of `attn_q` and `attn_k` are in half-split RoPE order: feature i turns with feature i + n_rot/2.
  (GGUF stores those of the llama family interleaved, 2i with 2i + 1; they are put back at load.)
- A norm's weight is the factor itself, as GGUF stores it. Gemma's checkpoints on Hugging Face hold the
  factor minus 1; their loader adds 1.
- RoPE frequency factors are tensors: `rope_freqs.weight` (llama3), `rope_factors_long.weight` and
  `rope_factors_short.weight` (longrope), float32 [n_rot / 2]; frequencies are divided by them.
- Hyperparameters are those of `engine.weights.hparams.Hparams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engine.weights.vocabulary import TokenizerData

Hparam = int | float | bool | str


class Weights(Protocol):
    """An opened model: its header is read and checked, its tensors are decoded one by one when asked for."""

    @property
    def name(self) -> str:
        """What to call the model in front of people."""

    @property
    def architecture(self) -> str:
        """GGUF's word for the family: llama (mistral too), qwen2, qwen3, gemma3, or one we do not know."""

    @property
    def hparams(self) -> Mapping[str, object]:
        """Checked hyperparameters. Raises WeightsRefused, naming the field that is missing or absurd."""

    @property
    def tokenizer_data(self) -> TokenizerData:
        """What the tokenizer is built from. Raises WeightsRefused if the model carries none."""

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the chat template, for models that have one."""

    @property
    def digest(self) -> str:
        """`b3-<64 hex>`: BLAKE3 over the content, read once and remembered; not path, not time."""

    def names(self) -> tuple[str, ...]:
        """Every tensor, sorted."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the header alone. Raises WeightsRefused if there is no such tensor."""

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of its own, contiguous, on the CPU, in `dtype`. Raises WeightsRefused as `shape` does."""

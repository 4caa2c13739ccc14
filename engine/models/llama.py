"""llama, mistral, qwen2 and qwen3: one decoder. Qwen2 adds biases to q, k and v, Qwen3 norms to the heads
of q and k, and mistral may have a window; all of it is found in the tensors and numbers of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, View, keys_and_values
from engine.models.base import Placement, WeightSource, describe, read_hparams
from engine.models.layers import Attention, FeedForward, RmsNorm
from engine.models.loading import Loader, load_attention, load_ffn, load_head
from engine.models.scaling import read_scaling
from engine.rope import build_rotary
from engine.state import Value


@dataclass(frozen=True, slots=True)
class Block:
    attention_norm: RmsNorm
    attention: Attention
    ffn_norm: RmsNorm
    ffn: FeedForward


class Llama:
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        hp, load = read_hparams(weights), Loader(weights, placement)
        self.hparams = hp
        self._placement = placement
        self._rotary = build_rotary(
            hp.n_rot, hp.rope_base, read_scaling(weights, placement.n_ctx), placement.n_ctx
        )
        self._embedding = load.tensor("token_embd.weight", hp.vocab_size, hp.width)
        self._blocks = tuple(self._block(load, layer) for layer in range(hp.num_layers))
        self._norm = load.norm("output_norm", hp.width, hp.rms_eps)
        self._head = load_head(load, hp, self._embedding)

    @property
    def needs(self) -> MemoryNeeds:
        hp = self.hparams
        parts: list[PartNeed] = []
        for layer, window in enumerate(hp.windows):
            rotary = self._rotary
            parts += keys_and_values(layer, hp.num_kv_heads, hp.head_size, hp.head_size_v, rotary, window)
        return MemoryNeeds("iswa" if any(hp.windows) else "kv", tuple(parts))

    @property
    def vocab_size(self) -> int:
        return self.hparams.vocab_size

    @property
    def n_ctx_train(self) -> int:
        return self.hparams.n_ctx_train

    @property
    def meaning(self) -> Mapping[str, Value]:
        return describe(self.hparams, self.needs)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        dtype, device = self._placement.dtype, self._placement.device
        angles = self._rotary.angles(positions, device)
        x = F.embedding(tokens.to(device), self._embedding).float()
        for block in self._blocks:
            x = x + block.attention(block.attention_norm(x).to(dtype), angles, view)
            x = x + block.ffn(block.ffn_norm(x).to(dtype))
        return self._head(self._norm(x[outputs.to(device)]).to(dtype)).float()

    def _block(self, load: Loader, layer: int) -> Block:
        hp, prefix = self.hparams, f"blk.{layer}"
        return Block(
            attention_norm=load.norm(f"{prefix}.attn_norm", hp.width, hp.rms_eps),
            attention=load_attention(load, hp, layer),
            ffn_norm=load.norm(f"{prefix}.ffn_norm", hp.width, hp.rms_eps),
            ffn=load_ffn(load, hp, layer, F.silu),
        )

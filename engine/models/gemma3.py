"""Gemma 3: norms before and after each half of a block, norms on the heads of q and k, and five layers
with a sliding window (and a RoPE base of their own) to each one that sees everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, View, keys_and_values
from engine.models.base import Placement, Reader, WeightSource, describe, read_hparams
from engine.models.layers import Attention, FeedForward, RmsNorm
from engine.models.loading import Loader, load_attention, load_ffn, load_head
from engine.models.scaling import read_scaling
from engine.rope import Angles, RopeScaling, build_rotary
from engine.state import Value


@dataclass(frozen=True, slots=True)
class Block:
    attention_norm: RmsNorm
    attention: Attention
    after_attention_norm: RmsNorm
    ffn_norm: RmsNorm
    ffn: FeedForward
    after_ffn_norm: RmsNorm
    local: bool


class Gemma3:
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        hp, load, read = read_hparams(weights), Loader(weights, placement), Reader(weights)
        self.hparams = hp
        self._placement = placement
        n_ctx, local_base = placement.n_ctx, read.number("rope.freq_base_swa")
        self._global_rotary = build_rotary(hp.n_rot, hp.rope_base, read_scaling(weights, n_ctx), n_ctx)
        self._local_rotary = build_rotary(hp.n_rot, local_base, RopeScaling(), n_ctx)
        self._embedding = load.tensor("token_embd.weight", hp.vocab_size, hp.width)
        # Rounded to the model's dtype, as the model was trained.
        self._embedding_scale = float(torch.tensor(hp.width**0.5, dtype=placement.dtype))
        self._blocks = tuple(self._block(load, layer) for layer in range(hp.num_layers))
        self._norm = load.norm("output_norm", hp.width, hp.rms_eps)
        self._head = load_head(load, hp, self._embedding)

    @property
    def needs(self) -> MemoryNeeds:
        hp = self.hparams
        parts: list[PartNeed] = []
        for layer, window in enumerate(hp.windows):
            rotary = self._global_rotary if window is None else self._local_rotary
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
        local = self._local_rotary.angles(positions, device)
        far = self._global_rotary.angles(positions, device)
        x = F.embedding(tokens.to(device), self._embedding).float() * self._embedding_scale
        for block in self._blocks:
            x = self._pass(block, x, local if block.local else far, view)
        return self._head(self._norm(x[outputs.to(device)]).to(dtype)).float()

    def _pass(self, block: Block, x: torch.Tensor, angles: Angles, view: View) -> torch.Tensor:
        dtype = self._placement.dtype
        attended = block.attention(block.attention_norm(x).to(dtype), angles, view)
        x = x + block.after_attention_norm(attended.float())
        return x + block.after_ffn_norm(block.ffn(block.ffn_norm(x).to(dtype)).float())

    def _block(self, load: Loader, layer: int) -> Block:
        hp, prefix = self.hparams, f"blk.{layer}"

        def norm(name: str) -> RmsNorm:
            return load.norm(f"{prefix}.{name}", hp.width, hp.rms_eps)

        return Block(
            attention_norm=norm("attn_norm"),
            attention=load_attention(load, hp, layer),
            after_attention_norm=norm("post_attention_norm"),
            ffn_norm=norm("ffn_norm"),
            ffn=load_ffn(load, hp, layer, gelu),
            after_ffn_norm=norm("post_ffw_norm"),
            local=hp.windows[layer] is not None,
        )


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")

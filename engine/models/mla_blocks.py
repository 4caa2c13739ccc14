"""Blocks of decoders with latent attention, and runs of them that attend to the same choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.cache.memory import Chosen
from engine.models.decoder import Ends, Pass
from engine.models.fields import Fields
from engine.models.layers import RmsNorm
from engine.models.loading import Loader, hub_head
from engine.models.mla import LatentAttention, Lowered
from engine.models.mla_ffn import Ffn
from engine.models.mla_indexer import Indexer
from engine.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class LatentBlock:
    """One layer; `kind` names its angles. Alone it attends to all that its memory lets it see."""

    kind: str
    attention_norm: RmsNorm
    attention: LatentAttention
    ffn_norm: RmsNorm
    ffn: Ffn

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h, lowered = self.lower(x, step)
        return self.finish(x, h, lowered, step, None)

    def lower(self, x: torch.Tensor, step: Pass) -> tuple[torch.Tensor, Lowered]:
        """The normed input of attention, and what it is lowered to."""
        h = self.attention_norm(x).to(step.dtype)
        return h, self.attention.lower(h, step.angles[self.kind])

    def finish(
        self, x: torch.Tensor, h: torch.Tensor, lowered: Lowered, step: Pass, chosen: Chosen | None
    ) -> torch.Tensor:
        """The rest of the layer."""
        x = x + self.attention(h, lowered, step.angles[self.kind], step.view, chosen)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


@dataclass(frozen=True, slots=True)
class IndexedRun:
    """Layers in a row, of which the first chooses for all: what it chose holds within a pass, and is not
    remembered."""

    indexer: Indexer
    first: LatentBlock
    others: tuple[LatentBlock, ...] = ()

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h, lowered = self.first.lower(x, step)
        chosen = self.indexer(h, lowered.latent, step.angles[self.first.kind], step.view)
        x = self.first.finish(x, h, lowered, step, chosen)
        for block in self.others:
            x = block.finish(x, *block.lower(x, step), step, chosen)
        return x


def load_block(
    load: Loader, prefix: str, kind: str, width: int, eps: float, attention: LatentAttention, ffn: Ffn
) -> LatentBlock:
    """The norms of `prefix` under the hub's names, around the halves that are given."""
    return LatentBlock(
        kind=kind,
        attention_norm=load.norm(f"{prefix}.input_layernorm", width, eps),
        attention=attention,
        ffn_norm=load.norm(f"{prefix}.post_attention_layernorm", width, eps),
        ffn=ffn,
    )


def load_ends(load: Loader, fields: Fields, sizes: Sizes, eps: float, prefix: str = "model") -> Ends:
    """What stands before the blocks and behind them, under the hub's names."""
    embedding = load.tensor(f"{prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
    return Ends(
        embedding,
        load.norm(f"{prefix}.norm", sizes.width, eps),
        hub_head(load, fields, sizes, embedding, tied=False),
    )

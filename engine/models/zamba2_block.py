"""The transformer blocks that layers of Zamba2 share (Glorioso et al. 2024, "The Zamba2 Suite", section 2): a
few blocks take turns at many places, each place with adapters of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.linear import Linear
from engine.models.decoder import Pass
from engine.models.fields import Fields
from engine.models.layers import Attention, FeedForward, Projection, RmsNorm
from engine.models.loading import Loader, check_bias, hub_qkv
from engine.models.sizes import FULL, Sizes


@dataclass(frozen=True, slots=True)
class Adapter:
    """up(down(x)), of low rank."""

    down: Linear
    up: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


@dataclass(frozen=True, slots=True)
class Adapted:
    """A shared matrix, and what the adapters of one place add to its rows, one part after the other."""

    shared: Linear
    adapters: tuple[Adapter, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) + torch.cat([adapter(x) for adapter in self.adapters], -1)


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A transformer block at one of its places. It adds nothing to a stream; `out` is the place's own. Every
    rank has all of it: adapters of a place would have to be divided as the matrices are that they adapt."""

    norm: RmsNorm
    attention: Attention
    ffn_norm: RmsNorm
    ffn: FeedForward
    out: Linear
    turned: bool

    def __call__(self, x: torch.Tensor, first: torch.Tensor, step: Pass) -> torch.Tensor:
        """What the place's mixer gets beside the stream `x`; `first` is the tokens' embeddings. All float32
        [tokens, width]."""
        angles = step.angles[FULL] if self.turned else None
        h = self.norm(torch.cat((x, first), -1)).to(step.dtype)
        h = self.ffn_norm(self.attention(h, angles, step.view).float()).to(step.dtype)
        return self.out(self.ffn(h)).float()


@dataclass(frozen=True, slots=True)
class Shared:
    """What a block has at every place; tensors of its places' adapters are under `prefix` too."""

    prefix: str
    norm: RmsNorm
    qkv: Linear
    attended: Linear
    ffn_norm: RmsNorm
    gate_up: Linear
    down: Linear


def load_shared_blocks(
    load: Loader, fields: Fields, sizes: Sizes, places: Sequence[int], eps: float
) -> dict[int, SharedBlock]:
    """By layer: the blocks take turns at `places`, and the file has each where it first stands."""
    num_blocks = fields.count("num_mem_blocks", 1)
    shared = [_load_shared(load, fields, sizes, layer, eps) for layer in places[:num_blocks]]
    return {
        layer: _at_place(load, fields, sizes, shared[number % num_blocks], number, layer)
        for number, layer in enumerate(places)
    }


def _load_shared(load: Loader, fields: Fields, sizes: Sizes, layer: int, eps: float) -> Shared:
    prefix = f"model.layers.{layer}.shared_transformer"
    width, inner = sizes.width, _inner(fields, sizes)
    check_bias(load, fields, f"{prefix}.feed_forward.gate_up_proj", False, "add_bias_linear")
    return Shared(
        prefix=prefix,
        norm=load.norm(f"{prefix}.input_layernorm", 2 * width, eps),
        qkv=hub_qkv(load.mirrored, f"{prefix}.self_attn", replace(sizes, width=2 * width)),
        attended=load.linear((f"{prefix}.self_attn.o_proj",), (width,), sizes.num_heads * sizes.head_size),
        ffn_norm=load.norm(f"{prefix}.pre_ff_layernorm", width, eps),
        gate_up=load.linear((f"{prefix}.feed_forward.gate_up_proj",), (2 * inner,), width),
        down=load.linear((f"{prefix}.feed_forward.down_proj",), (width,), inner),
    )


def _at_place(
    load: Loader, fields: Fields, sizes: Sizes, shared: Shared, number: int, layer: int
) -> SharedBlock:
    """`number` counts places, in whose order the file has adapters."""
    width, inner, rank = sizes.width, _inner(fields, sizes), fields.count("adapter_rank", 128)

    def adapter(name: str, rows: int, columns: int) -> Adapter:
        prefix = f"{shared.prefix}.{name}.{number}"
        return Adapter(
            load.linear((f"{prefix}.0",), (rank,), columns), load.linear((f"{prefix}.1",), (rows,), rank)
        )

    qkv: Projection = shared.qkv
    if fields.flag("use_shared_attention_adapter", False):
        q_rows, kv_rows = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        names = {f"self_attn.linear_{part}_adapter_list": count for part, count in rows.items()}
        qkv = Adapted(shared.qkv, tuple(adapter(name, count, 2 * width) for name, count in names.items()))
    gate_up = adapter("feed_forward.gate_up_proj_adapter_list", 2 * inner, width)
    return SharedBlock(
        norm=shared.norm,
        attention=Attention(
            layer=layer,
            qkv=qkv,
            out=shared.attended,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_size,
            head_size_v=sizes.head_size,
            scale=(sizes.head_size / 2) ** -0.5,
            norm=None,
        ),
        ffn_norm=shared.ffn_norm,
        ffn=FeedForward(Adapted(shared.gate_up, (gate_up,)), shared.down, F.gelu),
        out=load.linear((f"model.layers.{layer}.linear",), (width,), width),
        turned=fields.flag("use_mem_rope", False),
    )


def _inner(fields: Fields, sizes: Sizes) -> int:
    return fields.count("intermediate_size", 4 * sizes.width)

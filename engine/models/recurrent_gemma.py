"""RecurrentGemma (Botev et al. 2024): Griffin's gated linear recurrences (De et al. 2024, section 2.4) and
layers of attention with a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, PointSpec, View, WindowSpec, keys_and_values
from engine.linear import Linear
from engine.models.base import DEFAULT_CONTEXT, Placement, WeightSource
from engine.models.conv import ShortConv, load_conv
from engine.models.decoder import Decoder, Ends, Pass
from engine.models.fields import Fields
from engine.models.gemma3 import gelu
from engine.models.hub_rope import read_rope
from engine.models.layers import Attention, FeedForward, RmsNorm
from engine.models.loading import Loader, check_bias, hub_attention, hub_ffn, hub_head
from engine.models.scan.lru import linear_recurrence
from engine.models.scan.pieces import starts_of
from engine.models.sizes import SLIDING, Sizes, read_sizes

CONV, STATE = "lru.conv", "lru.state"

#: words of block_types
RECURRENT, ATTENTION = "recurrent", "attention"

#: how much an open recurrence gate sharpens the forgetting: c of De et al. 2024, section 2.4
_SHARPNESS = 8.0


@dataclass(frozen=True, slots=True)
class BlockGate:
    """Sigmoids of a matrix that mixes values within blocks alone. float32: `weight` [blocks, size (in), size
    (out)], `bias` [blocks, 1, size]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [.., blocks * size], to the same shape."""
        blocks, size = self.weight.shape[:2]
        mixed = torch.baddbmm(self.bias, x.reshape(-1, blocks, size).transpose(0, 1), self.weight)
        return torch.sigmoid(mixed.transpose(0, 1)).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """`inputs` has the rows of the branch that recurs and of the one that gates the output. `rate` is
    softplus of the file's parameter, float32 [width]."""

    layer: int
    inputs: Linear
    conv: ShortConv
    input_gate: BlockGate
    recurrence_gate: BlockGate
    rate: torch.Tensor
    out: Linear

    def __call__(self, x: torch.Tensor, view: View, positions: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        segments = len(view.segments)
        branch, gate = self.inputs(x).chunk(2, dim=-1)
        rows = branch.float().view(segments, -1, branch.shape[1])
        mixed, tails = self.conv(rows, view.point(CONV, self.layer), view.newest)
        view.set_point(CONV, self.layer, tails)
        log_decay = -_SHARPNESS * self.recurrence_gate(mixed) * self.rate
        # What comes in is scaled so that it keeps its size beside what stays, and whole at the first token.
        share = torch.sqrt(-torch.expm1(2 * log_decay))
        share = share.masked_fill((positions == 0).view(segments, -1, 1), 1.0)
        hidden, states = linear_recurrence(
            starts_of(view),
            view.point(STATE, self.layer),
            mixed * self.input_gate(mixed) * share,
            log_decay.exp(),
            view.newest,
        )
        view.set_point(STATE, self.layer, states)
        return self.out((hidden.view(branch.shape) * gelu(gate).float()).to(x.dtype))


@dataclass(frozen=True, slots=True)
class GriffinBlock:
    mixer_norm: RmsNorm
    mixer: Recurrence | Attention
    ffn_norm: RmsNorm
    ffn: FeedForward

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        h = self.mixer_norm(x).to(step.dtype)
        if isinstance(self.mixer, Recurrence):
            x = x + self.mixer(h, step.view, step.positions)
        else:
            x = x + self.mixer(h, step.angles[SLIDING], step.view)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


class RecurrentGemma(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields, DEFAULT_CONTEXT)
        fields.only("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
        kinds = _read_kinds(fields, sizes.num_layers)
        window = WindowSpec(fields.count("attention_window_size"))
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_share=0.5)
        lru_width = fields.count("lru_width", sizes.width)
        if lru_width % sizes.num_heads:
            raise fields.refused("lru_width", lru_width)
        kernel = fields.count("conv1d_width", least=2, most=2**16)
        eps, width = fields.number("rms_norm_eps", 1e-6), sizes.width
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, width)
        parts: list[PartNeed] = []
        blocks: list[GriffinBlock] = []
        for layer, kind in enumerate(kinds):
            name, size = f"model.layers.{layer}", sizes.head_size
            if kind == ATTENTION:
                parts += keys_and_values(layer, sizes.num_kv_heads, size, size, rotary, window)
                mixer: Recurrence | Attention = _attention(
                    load, fields, f"{name}.temporal_block", layer, sizes
                )
            else:
                parts.append(PointSpec(CONV, layer, (kernel - 1, lru_width)))
                parts.append(PointSpec(STATE, layer, (lru_width,)))
                mixer = _recurrence(load, f"{name}.temporal_block", layer, sizes, lru_width, kernel)
            blocks.append(
                GriffinBlock(
                    mixer_norm=load.norm_from_one(f"{name}.temporal_pre_norm", width, eps),
                    mixer=mixer,
                    ffn_norm=load.norm_from_one(f"{name}.channel_pre_norm", width, eps),
                    ffn=hub_ffn(
                        load,
                        f"{name}.mlp_block",
                        width,
                        fields.count("intermediate_size", least=2) // 2,
                        gelu,
                    ),
                )
            )
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("hybrid_iswa", tuple(parts)),
            rotaries={SLIDING: rotary},
            ends=Ends(
                embedding,
                load.norm_from_one("model.final_norm", width, eps),
                hub_head(load, fields, sizes, embedding, tied=True),
                # Rounded to bf16 whatever the model computes in, as it was trained.
                embedding_scale=float(torch.tensor(width**0.5, dtype=torch.bfloat16)),
                softcap=fields.positive("logits_soft_cap", 30.0),
            ),
            blocks=blocks,
        )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """RECURRENT or ATTENTION of each layer: a pattern that begins anew at its end. There must be both."""
    pattern: tuple[str, ...] = (RECURRENT, RECURRENT, ATTENTION)
    if fields.has("block_types"):
        pattern = fields.words("block_types", None, (RECURRENT, ATTENTION))
    kinds = tuple(pattern[layer % len(pattern)] for layer in range(num_layers))
    if len(set(kinds)) != 2:
        raise fields.refused("block_types", " ".join(kinds))
    return kinds


def _attention(load: Loader, fields: Fields, prefix: str, layer: int, sizes: Sizes) -> Attention:
    check_bias(load, fields, f"{prefix}.q_proj", False)
    return hub_attention(load, prefix, layer, sizes, sizes.head_size**-0.5)


def _recurrence(load: Loader, prefix: str, layer: int, sizes: Sizes, width: int, kernel: int) -> Recurrence:
    both = (f"{prefix}.linear_x", f"{prefix}.linear_y")
    return Recurrence(
        layer=layer,
        inputs=load.linear(both, (width, width), sizes.width),
        conv=load_conv(load, f"{prefix}.conv_1d", width, kernel),
        input_gate=_gate(load, f"{prefix}.rg_lru.input_gate", sizes.num_heads, width),
        recurrence_gate=_gate(load, f"{prefix}.rg_lru.recurrent_gate", sizes.num_heads, width),
        rate=F.softplus(load.exact(f"{prefix}.rg_lru.recurrent_param", width)),
        out=load.linear((f"{prefix}.linear_out",), (sizes.width,), width),
    )


def _gate(load: Loader, name: str, num_heads: int, width: int) -> BlockGate:
    size = width // num_heads
    return BlockGate(
        weight=load.exact(f"{name}_weight", num_heads, size, size),
        bias=load.exact(f"{name}_bias", num_heads, size)[:, None],
    )

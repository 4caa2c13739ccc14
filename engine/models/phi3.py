"""Phi-3 and Phi-4: a llama whose matrices are stored joined, with a share of each head turned and RoPE
stretched by two tables of factors (LongRoPE, Ding et al. 2024)."""

from __future__ import annotations

import torch.nn.functional as F

from engine.cache.memory import WindowSpec
from engine.models.base import Placement, WeightSource
from engine.models.blocks import SerialBlock
from engine.models.decoder import Decoder, Ends, grouped_needs
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope, rope_section, rope_type
from engine.models.layers import Attention
from engine.models.loading import Loader, gated, hub_head, hub_out
from engine.models.sizes import FULL, Sizes, read_sizes


class Phi3(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_act", ("silu",), "silu")
        fields.only("attention_bias", False, False)
        # The name "yarn" means other things in files of this family than elsewhere.
        rope_type(rope_section(fields, None), ("default", "longrope", "su"))
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx)
        window = WindowSpec(fields.count("sliding_window")) if fields.has("sliding_window") else None
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        eps = fields.positive("rms_norm_eps", 1e-5)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=grouped_needs(sizes, [(rotary, window)] * sizes.num_layers),
            rotaries={FULL: rotary},
            ends=Ends(
                embedding,
                load.norm("model.norm", sizes.width, eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=[_block(load, fields, sizes, layer, eps) for layer in range(sizes.num_layers)],
        )


def _block(load: Loader, fields: Fields, sizes: Sizes, layer: int, eps: float) -> SerialBlock:
    width, inner, prefix = sizes.width, fields.count("intermediate_size"), f"model.layers.{layer}"
    q_rows, kv_rows = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    mine, size = load.share.heads(sizes.num_heads, sizes.num_kv_heads), sizes.head_size
    attention = Attention(
        layer=layer,
        qkv=load.linear(
            (f"{prefix}.self_attn.qkv_proj",), (q_rows + 2 * kv_rows,), width, mine.joined(size, size)
        ),
        out=hub_out(load, f"{prefix}.self_attn.o_proj", sizes),
        num_heads=len(mine.q),
        num_kv_heads=len(mine.kv),
        head_size=sizes.head_size,
        head_size_v=sizes.head_size,
        scale=sizes.head_size**-0.5,
        norm=None,
    )
    both, down = (f"{prefix}.mlp.gate_up_proj",), f"{prefix}.mlp.down_proj"
    ffn = gated(load, both, down, width, inner, F.silu)
    return SerialBlock(
        kind=FULL,
        attention_norm=load.norm(f"{prefix}.input_layernorm", width, eps),
        attention=attention,
        ffn_norm=load.norm(f"{prefix}.post_attention_layernorm", width, eps),
        ffn=ffn,
    )

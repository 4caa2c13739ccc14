"""The layer of Qwen3-Next that predicts further tokens, `mtp.*`: one depth, whose layer has full attention.

Norms are stored as what they are above 1, as the model's own are. The hidden state is the one after the
model's last norm, and `fc` reads the embedding first: so have it vLLM (qwen3_next_mtp.py) and SGLang, and for
the same layout in Qwen3.6 llama.cpp (#24025) measured that more guesses are right than with the state before
that norm. transformers does not read these tensors.
"""

from __future__ import annotations

from engine.cache.memory import MemoryNeeds, keys_and_values
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Ends
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope
from engine.models.loading import Loader
from engine.models.mtp import Mtp, MtpLayer
from engine.models.qwen3_next import DeltaBlock, centred_norm, load_experts, load_gated_attention
from engine.models.sizes import FULL, read_sizes

#: the parts of the file that are not within the layer
_OWN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def load_delta_mtp(weights: WeightSource, placement: Placement, ends: Ends) -> Mtp | None:
    """None where the file has none. Raises WeightsRefused for some parts."""
    fields, load = Fields(weights), Loader(weights, placement)
    if not any(load.has(f"mtp.{part}.weight") for part in _OWN):
        return None
    fields.only("num_nextn_predict_layers", 1, 1)
    sizes, eps = read_sizes(fields), fields.number("rms_norm_eps", 1e-6)
    rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_share=0.25)
    number, prefix, width = sizes.num_layers, "mtp.layers.0", sizes.width
    block = DeltaBlock(
        mixer_norm=centred_norm(load, f"{prefix}.input_layernorm", width, eps),
        mixer=load_gated_attention(load, f"{prefix}.self_attn", number, sizes, eps),
        ffn_norm=centred_norm(load, f"{prefix}.post_attention_layernorm", width, eps),
        ffn=load_experts(load, fields, f"{prefix}.mlp", 0, width),
    )
    layer = MtpLayer(
        embedding_norm=centred_norm(load, "mtp.pre_fc_norm_embedding", width, eps),
        hidden_norm=centred_norm(load, "mtp.pre_fc_norm_hidden", width, eps),
        join=load.linear(("mtp.fc",), (width,), 2 * width),
        block=block,
        norm=centred_norm(load, "mtp.norm", width, eps),
    )
    rows = keys_and_values(number, sizes.num_kv_heads, sizes.head_size, sizes.head_size, rotary)
    return Mtp(MemoryNeeds("kv", rows), [layer], {FULL: rotary}, ends, placement)

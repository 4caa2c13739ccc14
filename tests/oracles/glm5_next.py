"""glm5_next: Kimi Delta Attention, latent attention over pooled blocks, hyper-connections, experts. Only the
model that also sees has a class; it is given text.

Half of the layers attend, with a budget of two blocks: a wrong choice moves every logit.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists

_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "projection_intermediate_size": 32,
    "image_size": 28,
}
_MEDIA = ("image", "video", "image_start", "image_end", "video_start", "video_end")


class Various(Glm5NextForConditionalGeneration):
    """Heads that forget at different paces, and a choice that every layer hands on: the library's own is lost
    behind the next layer, so that it raises where a third one shares it."""

    def __init__(self, config: Glm5NextConfig) -> None:
        super().__init__(config)
        for layer in self.model.language_model.layers:
            layer.forward = _handing_on(layer.forward)

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            with torch.no_grad():
                if name == "A_log":
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()))


def _handing_on(forward: Any) -> Any:
    def wrapped(*args: Any, prev_topk_indices: torch.Tensor | None = None, **others: Any) -> Any:
        streams, chosen = forward(*args, prev_topk_indices=prev_topk_indices, **others)
        return streams, prev_topk_indices if chosen is None else chosen

    return wrapped


def make(**changes: Any) -> tuple[type, Glm5NextConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "index_topk": 8,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "max_position_embeddings": 256,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_types": ["full"] * 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    }
    text = {**sizes, **TOKEN_IDS, **lists(changes)}
    media = {f"{name}_token_id": number for number, name in enumerate(_MEDIA, start=290)}
    return Various, Glm5NextConfig(text_config=text, vision_config=_VISION, **media)

"""Tensor names: those of Hugging Face's checkpoints, and GGUF's, which are the engine's.

    Hugging Face                                   ours
    model.embed_tokens.weight                      token_embd.weight
    model.norm.weight                              output_norm.weight
    lm_head.weight                                 output.weight
    model.layers.<n>.self_attn.q_proj.weight       blk.<n>.attn_q.weight       (k_proj, v_proj; .bias too)
    model.layers.<n>.self_attn.o_proj.weight       blk.<n>.attn_output.weight
    model.layers.<n>.self_attn.q_norm.weight       blk.<n>.attn_q_norm.weight  (k_norm)
    model.layers.<n>.mlp.gate_proj.weight          blk.<n>.ffn_gate.weight     (up_proj, down_proj)
    model.layers.<n>.input_layernorm.weight        blk.<n>.attn_norm.weight

The other norms are named by what they do in the family, see `_NORMS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_OUTSIDE: Mapping[str, str] = MappingProxyType(
    {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
)
_PROJECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
    }
)
#: "post_attention_layernorm" stands before the feed-forward part in llama, and behind attention in gemma3
_NORMS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "llama": {"post_attention_layernorm": "ffn_norm"},
        "qwen2": {"post_attention_layernorm": "ffn_norm"},
        "qwen3": {"post_attention_layernorm": "ffn_norm"},
        "gemma3": {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    }
)
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.(.+)\.(weight|bias)")
#: How the text model is called inside a model that sees as well, before and since transformers 4.52.
_TEXT_MODEL = re.compile(r"^(language_model\.(?=model\.|lm_head\.)|model\.language_model\.)")


def engine_name(architecture: str, name: str) -> str | None:
    """Our name for the tensor `name`; None for what the engine does not use (vision, stored RoPE tables)."""
    found = _TEXT_MODEL.match(name)
    if found:
        rest = name[found.end() :]
        name = rest if found.group().startswith("language_model.") else f"model.{rest}"
    layer = _LAYER.fullmatch(name)
    if layer is None:
        stem, _, kind = name.rpartition(".")
        return f"{_OUTSIDE[stem]}.{kind}" if stem in _OUTSIDE and kind in ("weight", "bias") else None
    number, part, kind = layer.groups()
    ours = _PROJECTIONS.get(part) or _NORMS.get(architecture, {}).get(part)
    return None if ours is None else f"blk.{int(number)}.{ours}.{kind}"


def is_norm(name: str) -> bool:
    """Whether the tensor `name` (ours) is a norm's weight."""
    return name.endswith("_norm.weight")

"""Tiny models of transformers with random weights, of families whose caches differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, BambaForCausalLM, LlamaForCausalLM

from engine.config import EngineConfig
from engine.hosted.host import host
from engine.runner import Engine
from engine.state import SeqId

VOCAB = 300
WINDOW = 16
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}

#: by family, its model_type and what its config gets beside the sizes
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
    ),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 128, **_MAMBA2}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1], **_MAMBA2}),
    "qwen3_next": (
        "qwen3_next",
        {
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "inkling": (
        "inkling_text",
        {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": WINDOW,
            "d_rel": 4,
            "rel_extent": 64,
            "conv_kernel_size": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "logits_mup_width_multiplier": 1.0,
            "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            "num_key_value_heads": 4,
            "head_dim": None,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 8,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}

Model = transformers.PreTrainedModel


class OwnLlama(LlamaForCausalLM):
    """A class of a user's own: it says what LlamaForCausalLM says, louder."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out


class OwnBamba(BambaForCausalLM):
    """One that names nothing of what it passes on: its base class wants to be told positions, or takes them
    from the beginning of what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


OWN: Mapping[str, tuple[str, type[transformers.PreTrainedModel]]] = {
    "own": ("llama", OwnLlama),
    "own_bamba": ("bamba", OwnBamba),
}


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Model:
    """A model of the family, or one of the classes of `OWN`."""
    like, own = OWN.get(family, (family, None))
    model_type, given = FAMILIES[like]
    sizes = {name: value for name, value in {**_SIZES, **given, **changes}.items() if value is not None}
    config = AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config) if own is None else own(config)
    _draw(model)
    converted: Model = torch.nn.Module.to(model, dtype).eval()
    return converted


@torch.no_grad()
def _draw(model: Model) -> None:
    """The library's own start (norms 1, biases 0, small matrices) would hide mistakes."""
    for name, parameter in model.named_parameters():
        if "A_log" in name:
            continue
        if parameter.dim() < 2:
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif "embed" in name:
            parameter.copy_(torch.randn_like(parameter))
        else:
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


def hosted(model: Model, **settings: object) -> Engine:
    """Its engine, of ids alone."""
    config = {"n_ctx": 400, "num_cells": 2000, "num_seqs": 6, "threads": 1, **settings}
    return host(model, None, EngineConfig.from_mapping(config))


def ids(count: int, seed: int = 1) -> list[int]:
    found: list[int] = torch.randint(
        3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return found


def said(engine: Engine, seq: SeqId, tokens: list[int]) -> torch.Tensor:
    """float32 [2 or more, vocab] logits: after the first three of `tokens` at once, and after each other."""
    engine.feed(seq, tokens[:3])
    found = [engine.logits(seq)]
    for token in tokens[3:]:
        engine.feed(seq, [token])
        found.append(engine.logits(seq))
    return torch.stack([logits for logits in found if logits is not None])


def forget(engine: Engine, *seqs: SeqId) -> None:
    """Close them, and leave no rows that later ones would share."""
    for seq in seqs:
        engine.rewind(seq, 0)
        engine.close(seq)

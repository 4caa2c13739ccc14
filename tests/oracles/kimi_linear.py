"""kimi_linear: three layers of Kimi Delta Attention to one of latent attention, experts in all but the first.

With `bound` the forgetting is bounded, as in Kimi K3, which the library has no class for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from tests.engine.weights.folders import VOCAB
from tests.oracles.base import TOKEN_IDS
from tests.oracles.variants import lists


class Bounded(KimiLinearForCausalLM):
    """Every channel forgets bound * sigmoid(speed * (f + dt)) a token."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if type(module).__name__ == "KimiLinearForgetGate":
                module.forward = _bounded(module, config.linear_attn_config["gate_lower_bound"])


def _bounded(gate: torch.nn.Module, bound: float) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        f = gate.f_b_proj(gate.f_a_proj(x)) + gate.dt_bias
        return bound * torch.sigmoid(gate.A_log.exp() * f.view(*x.shape[:2], -1, gate.head_dim))

    return forward


def make(bound: float | None = None, **changes: Any) -> tuple[type, KimiLinearConfig]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 256,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    }
    if bound is not None:
        changes["linear_attn_config"] = {"gate_lower_bound": bound}
    config = KimiLinearConfig(**{**sizes, **TOKEN_IDS, **lists(changes)})
    return KimiLinearForCausalLM if bound is None else Bounded, config

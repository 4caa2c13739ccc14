"""LongCat-Flash against transformers; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.linear import Linear
from engine.models.longcat_flash import ZeroComputeMixture
from engine.models.moe import Experts
from tests.engine.models.latent import LOSS, check_shift
from tests.oracles.base import check_numbers, open_engine, write
from tests.oracles.deepseek_v3 import YARN
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "three blocks": {"num_layers": 3},
    "no expert for free": {"zero_expert_num": 0},
    "most experts for free": {"n_routed_experts": 2, "zero_expert_num": 9, "moe_topk": 2},
    "every expert": {"moe_topk": 10},
    "scaled": {"routed_scaling_factor": 0.5},
    "biases": {"attention_bias": True},
    "yarn": {"rope": YARN},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("longcat_flash", tmp_path, atol=2e-5, **VARIATIONS[name])


def test_experts_that_cost_nothing_give_back_what_they_get() -> None:
    torch.manual_seed(0)
    experts = Experts(torch.randn(2, 6, 5), torch.randn(2, 5, 3), F.silu)
    chosen = torch.tensor([[3, 2], [0, 4], [4, 1]])
    weights = torch.tensor([[0.5, 0.25], [0.75, 2.0], [1.0, 0.5]])
    mixture = ZeroComputeMixture(Linear(torch.randn(5, 5)), lambda _: (chosen, weights), experts, 2)
    x = torch.randn(3, 5)
    out = mixture(x)
    torch.testing.assert_close(out[0], 0.75 * x[0])
    torch.testing.assert_close(out[1], 0.75 * experts.expert(0, x[1:2])[0] + 2.0 * x[1])
    torch.testing.assert_close(out[2], x[2] + 0.5 * experts.expert(1, x[2:])[0])


def test_each_attention_of_a_block_keeps_rows_of_its_own(tmp_path: Path) -> None:
    write("longcat_flash", tmp_path)
    names = [part.name for part in open_engine(tmp_path).layout]
    assert names == [f"kv.k.0{layer}" for layer in range(4)]


@pytest.mark.parametrize("dtype", LOSS)
def test_shifted_rows_are_those_of_the_new_positions(dtype: str, tmp_path: Path) -> None:
    check_shift("longcat_flash", tmp_path, dtype)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"quant_method": "fp8"},
        "num_layers": ...,
        "attention_method": "GQA",
        "mla_scale_q_lora": False,
        "router_bias": True,
        "zero_expert_type": "copy",
        "moe_topk": 11,
        "qk_head_dim": 64,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "expert_ffn_hidden_size": ...,
        "attention_bias": True,
    }
    check_refusals("longcat_flash", tmp_path, cases)

"""DeepSeek-V2 against transformers; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.latent import LOSS, check_shift
from tests.oracles.base import check_numbers
from tests.oracles.deepseek_v3 import YARN
from tests.oracles.refusals import check_refusals

LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "the Lite": {"q_lora_rank": None, "num_experts_per_tok": 3},
    "groups": LIMITED,
    "groups, all of some": {**LIMITED, "topk_group": 1},
    "groups that nothing limits": {**LIMITED, "topk_group": 4, "num_experts_per_tok": 5},
    "scaled": {"routed_scaling_factor": 16.0},
    "all dense": {"first_k_dense_replace": 3},
    "all sparse": {"first_k_dense_replace": 0},
    "biases": {"attention_bias": True},
    "yarn": {"rope": (*YARN, ("mscale", 0.707), ("mscale_all_dim", 0.707))},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("deepseek_v2", tmp_path, atol=2e-5, **VARIATIONS[name])


@pytest.mark.parametrize("dtype", LOSS)
def test_shifted_rows_are_those_of_the_new_positions(dtype: str, tmp_path: Path) -> None:
    check_shift("deepseek_v2", tmp_path, dtype)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "mlp_bias": True,
        "moe_layer_freq": 2,
        "num_experts_per_tok": 9,
        "v_head_dim": ...,
    }
    check_refusals("deepseek_v2", tmp_path, cases)

"""MiMo-V2-Flash against transformers, and what of its configurations is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.reading import read_all
from tests.engine.weights.folders import change_config
from tests.oracles.base import check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "shares as they are": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "dense": {"mlp_layer_types": ("dense",) * 4},
    "values as they are": {"attention_value_scale": None},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "no window": {"layer_types": ("full_attention",) * 4},
    "one head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    # Logits of tied matrices are eight times as large.
    check_numbers("mimo_v2_flash", tmp_path, atol=2e-4 if "tied" in name else 1e-4, **VARIATIONS[name])


def test_older_files_count_the_window_without_the_query_and_have_no_scale(tmp_path: Path) -> None:
    write("mimo_v2_flash", tmp_path)
    change_config(tmp_path, sliding_window=..., sliding_window_size=11, routed_scaling_factor=None)
    ids = tokens()
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), ids, (len(ids),))])
    torch.testing.assert_close(ours, reference("mimo_v2_flash", ids), atol=1e-4, rtol=0)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"quant_method": "fp8"},
        "v_head_dim": ...,
        "attention_value_scale": ...,
        "swa_num_key_value_heads": 3,
        "n_group": 3,
        "num_experts_per_tok": 9,
        "sliding_window": None,
        "attention_bias": True,
        "mlp_layer_types": ["dense"] * 3,
        "rope_parameters.full_attention.partial_rotary_factor": 0.33,
        "routed_scaling_factor": "1",
    }
    check_refusals("mimo_v2_flash", tmp_path, cases)

"""dots.3 Note against transformers, in the words of released files and in its own; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models.latent import LOSS, check_index_keys_are_rotated, check_shift
from tests.oracles.base import check_numbers, open_engine, reference, tokens, write
from tests.oracles.deepseek_v3 import DECODER, GROUPS, LATENT, changed
from tests.oracles.deepseek_v32 import INDEX
from tests.oracles.dots3_note import SIZES
from tests.oracles.refusals import check_refusals

NARROW, WIDE = "sliding_attention", "indexed_attention"

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fast turns": {"rope_theta": 300.0, "swa_rope_theta": 50.0},
    "groups": GROUPS,
    "sizes of its own pattern": {"num_hidden_layers": 7, "layer_types": None},
    "one window row": {"sliding_window": 1},
    "a window beyond the text": {"sliding_window": 100},
    "more rows than tokens": {"index_topk": 100},
    "no window": {"layer_types": (WIDE,) * 5},
    "sliding first": {"layer_types": (NARROW, WIDE, NARROW, NARROW, WIDE)},
    "sizes alike": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 64,
        "swa_head_dim": 80,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "no share of head_dim": {"head_dim": 256},
    "one width of all experts": {"shared_experts_intermediate_size": 32, "n_shared_experts": 1},
    "biases": {"attention_bias": True},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("dots3_note", tmp_path, atol=3e-5, **VARIATIONS[name])


def test_the_words_of_released_files_mean_the_same(tmp_path: Path) -> None:
    write("dots3_note", tmp_path)
    words = changed(LATENT, DECODER, INDEX, SIZES)
    words["layer_types"] = ["full_attention" if kind == WIDE else kind for kind in words["layer_types"]]
    words["sliding_window_size"] = words.pop("sliding_window")
    words["moe_shared_expert_intermediate_size"] = words.pop("shared_experts_intermediate_size")
    for name in ("n_group", "topk_group"):
        assert name not in words
    config = {"model_type": "dots3_note", "norm_topk_prob": True, "routed_scaling_factor": 1.0, **words}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine, ids = open_engine(tmp_path), tokens()
    seq = engine.create()
    engine.feed(seq, ids)
    logits = engine.logits(seq)
    assert logits is not None
    torch.testing.assert_close(logits, reference("dots3_note", ids)[-1], atol=3e-5, rtol=0)


@pytest.mark.parametrize("dtype", LOSS)
def test_shifted_rows_are_those_of_the_new_positions(dtype: str, tmp_path: Path) -> None:
    check_shift("dots3_note", tmp_path, dtype, ("kv.k", "idx.k"))


def test_shifted_rows_of_a_sliding_layer_turn_by_its_own_angles(tmp_path: Path) -> None:
    kinds = (NARROW, WIDE, NARROW, NARROW, WIDE)
    check_shift("dots3_note", tmp_path, "f32", layer_types=kinds, swa_rope_theta=50.0)


def test_index_keys_are_rotated_whatever_their_dtype(tmp_path: Path) -> None:
    check_index_keys_are_rotated("dots3_note", tmp_path)


def test_rows_of_each_kind_have_their_own_size(tmp_path: Path) -> None:
    write("dots3_note", tmp_path)
    layout = {part.name: (part.shape, part.window) for part in open_engine(tmp_path).layout}
    assert layout == {
        **{f"kv.k.0{layer}": ((1, 128), None) for layer in (0, 3)},
        **{f"idx.k.0{layer}": ((1, 96), None) for layer in (0, 3)},
        **{f"kv.k.0{layer}": ((1, 64), 12) for layer in (1, 2, 4)},
    }


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": ...,
        "use_dsa": False,
        "use_sliding_window": False,
        "mlp_bias": True,
        "attention_bias": True,
        "index_head_dim": 65,
        "indexer_rope_interleave": False,
        "rope_parameters.indexed_attention.rope_type": "yarn",
        "rope_parameters.sliding_attention.partial_rotary_factor": 0.5,
        "per_layer_config.1.kv_lora_rank": 0,
        "per_layer_config.1.num_key_value_heads": 1,
        "per_layer_config.2.qk_rope_head_dim": 16,
        "per_layer_config.4.q_lora_rank": "many",
        "shared_experts_intermediate_size": ...,
        "hidden_act": "gelu",
    }
    check_refusals("dots3_note", tmp_path, cases)


def test_meaning_has_every_number_that_rows_depend_on(tmp_path: Path) -> None:
    write("dots3_note", tmp_path)
    meaning = open_engine(tmp_path).fingerprint.meaning
    for name in ("index_topk", "sliding_window", "layer_types", "per_layer_config.1.kv_lora_rank"):
        assert any(key.endswith(f"config.{name}") for key in meaning), name

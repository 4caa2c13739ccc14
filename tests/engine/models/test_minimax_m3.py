"""MiniMax-M3 against transformers, with its tensors under both sets of names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsRefused
from tests.engine.reading import read_all
from tests.oracles.base import LENGTH, check_numbers, open_engine, reference, tokens, write
from tests.oracles.refusals import check_refusals

SPARSE = "minimax_m3_sparse"


def test_numbers(tmp_path: Path) -> None:
    check_numbers("minimax_m3", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"index_block_size": 1, "index_topk_blocks": 7},
        {"index_block_size": 7, "index_topk_blocks": 2, "index_local_blocks": 2},
        {"index_topk_blocks": 64},
        {"num_key_value_heads": 1, "index_n_heads": 1},
        {"num_key_value_heads": 4, "index_n_heads": 4, "index_head_dim": 16},
        {"index_head_dim": 64},
        {"tie_word_embeddings": True},
        {"swiglu_limit": 0.5, "swiglu_alpha": 1.0, "routed_scaling_factor": 1.0},
        {"layer_types": ("full_attention",) * 3, "mlp_layer_types": ("dense",) * 3},
        {"layer_types": (SPARSE, "full_attention", SPARSE), "mlp_layer_types": ("sparse", "sparse", "dense")},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items())[:60],
)
def test_every_shape_is_the_configurations(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("minimax_m3", tmp_path, **changes)


def test_the_choice_of_blocks_is_what_is_tested() -> None:
    chosen = reference("minimax_m3", tokens())
    everything = reference("minimax_m3", tokens(), index_topk_blocks=64)
    assert float((chosen - everything).abs().max()) > 0.1


def test_rotary_dim_alone_says_how_much_of_a_head_turns(tmp_path: Path) -> None:
    """transformers turns whole heads then: it reads the field and does nothing with it."""
    write("minimax_m3", tmp_path)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    _change(tmp_path, lambda tree: tree.update(rope_parameters=rope))
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("minimax_m3", tokens())).abs().max()) < 1e-4


@pytest.mark.parametrize("row_type", ["f32", "q8_0"])
def test_a_shift_moves_index_keys_as_it_moves_keys(row_type: str, tmp_path: Path) -> None:
    """Rows of a first layer know nothing but their token and position: those that were moved by whole blocks
    are those of a conversation that begins later."""
    one = {"num_hidden_layers": 1, "layer_types": (SPARSE,), "mlp_layer_types": ("dense",)}
    wide = {"head_dim": 64, "rotary_dim": 32, "index_head_dim": 64}
    write("minimax_m3", tmp_path, **one, **wide)
    engine = open_engine(tmp_path, type_k=row_type, type_v=row_type)
    moved, fresh = engine.create(), engine.create()
    engine.feed(moved, tokens())
    assert engine.shift(moved, 0, 24) == 24
    engine.feed(fresh, tokens()[24:])
    for token in tokens(seed=2, count=12):
        engine.advance({moved: [token]})
        engine.advance({fresh: [token]})
        ours, theirs = engine.logits(moved), engine.logits(fresh)
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).abs().max()) < (1e-4 if row_type == "f32" else 0.1)


def test_quantized_rows_of_every_part_stay_near(tmp_path: Path) -> None:
    """Heads and index vectors are wide enough to be rotated: a side that was not would be far off."""
    wide = {"head_dim": 64, "rotary_dim": 32, "index_head_dim": 64, "index_topk_blocks": 6}
    write("minimax_m3", tmp_path, **wide)
    theirs = reference("minimax_m3", tokens(), **wide)
    ours = []
    for row_type in ("q8_0", "q4_0"):
        engine = open_engine(tmp_path, type_k=row_type, type_v=row_type)
        ours.append(torch.cat([logits for _, logits in read_all(engine, tokens(), [40] + [1] * 24)]))
    fine, coarse = (float((one - theirs).square().mean().sqrt()) for one in ours)
    assert 1e-5 < fine < 0.05 < coarse < 0.4


#: names of the hub's checkpoint for the names of transformers; experts are split apart beside this
HUB_NAMES = {
    r"^lm_head": "language_model.lm_head",
    r"^model\.": "language_model.model.",
    r"\.mlp\.(experts|gate|shared_experts)\.": r".block_sparse_moe.\1.",
    r"\.gate\.e_score_correction_bias": ".e_score_correction_bias",
    r"\.self_attn\.indexer\.(.*)\.weight": r".self_attn.index_\1.weight",
}


def test_the_hubs_own_names_mean_the_same(tmp_path: Path) -> None:
    write("minimax_m3", tmp_path)
    path = tmp_path / "model.safetensors"
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        for pattern, hub in HUB_NAMES.items():
            name = re.sub(pattern, hub, name)
        if "experts.gate_up_proj" in name and "shared" not in name:
            for number, both in enumerate(tensor):
                for part, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    renamed[name.replace("gate_up_proj", f"{number}.{part}.weight")] = half.clone()
        elif "experts.down_proj" in name and "shared" not in name:
            for number, one in enumerate(tensor):
                renamed[name.replace("down_proj", f"{number}.w2.weight")] = one.clone()
        elif "gate_up_proj" in name:
            gate, up = tensor.chunk(2)
            renamed[name.replace("gate_up", "gate")] = gate.clone()
            renamed[name.replace("gate_up", "up")] = up.clone()
        else:
            renamed[name] = tensor
    save_file(renamed, path, metadata={"format": "pt"})
    _change(tmp_path, _as_on_the_hub)
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("minimax_m3", tokens())).abs().max()) < 1e-4


def _as_on_the_hub(tree: dict[str, Any]) -> None:
    """The checkpoint's names for the fields, inside of a model that sees."""
    text = {name: tree.pop(name) for name in list(tree) if name not in ("architectures", "model_type")}
    text["model_type"] = "minimax_m3_vl_text"
    del text["layer_types"], text["mlp_layer_types"], text["rope_parameters"]
    text |= {"rope_theta": 10000, "partial_rotary_factor": 0.5, "moe_layer_freq": [0, 1, 1]}
    text["hidden_act"] = "swigluoai"
    text["sparse_attention_config"] = {
        "sparse_attention_freq": [0, 1, 1],
        "sparse_num_index_heads": text.pop("index_n_heads"),
        "sparse_index_dim": text.pop("index_head_dim"),
        "sparse_block_size": text.pop("index_block_size"),
        "sparse_topk_blocks": text.pop("index_topk_blocks"),
        "sparse_local_block": text.pop("index_local_blocks"),
        "sparse_init_block": 0,
        "sparse_score_type": "max",
    }
    tree |= {"model_type": "minimax_m3_vl", "text_config": text}


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense"],
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_block_size": 0,
        "index_topk_blocks": ...,
        "index_local_blocks": 4,
        "rotary_dim": 8,
        "num_experts_per_tok": 5,
        "num_local_experts": ...,
        "hidden_act": "gelu",
        "use_gemma_norm": False,
        "use_routing_bias": False,
        "attention_output_gate": True,
        "n_shared_experts": 2,
        "quantization_config": {"quant_method": "fp8"},
    }
    check_refusals("minimax_m3", tmp_path, cases)


@pytest.mark.parametrize("field", ["sparse_init_block", "sparse_score_type", "use_sparse_attention"])
def test_other_laws_of_choice_are_refused(field: str, tmp_path: Path) -> None:
    write("minimax_m3", tmp_path)
    _change(tmp_path, lambda tree: tree.update(sparse_attention_config={field: "mean"}))
    with pytest.raises(WeightsRefused, match=field):
        open_engine(tmp_path)


def _change(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))

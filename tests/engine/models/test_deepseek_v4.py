"""DeepSeek-V4 against transformers, and the real model's shapes out of its configuration alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cache.memory import BlocksSpec, PointSpec, RowsSpec, Turned
from engine.errors import WeightsRefused
from engine.models.base import WeightSource
from engine.models.deepseek_v4_config import needs_of, read_config
from engine.models.fields import Fields
from tests.engine.reading import read_all
from tests.oracles.base import LENGTH, build, check_numbers, open_engine, reference, tokens, write
from tests.oracles.deepseek_v4 import HEAVY, SPARSE, WINDOW
from tests.oracles.older import check_full_pass
from tests.oracles.refusals import check_refusals


def test_numbers(tmp_path: Path) -> None:
    check_numbers("deepseek_v4", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"sparse": 3, "heavy": 7},
        {"sparse": 1, "heavy": 2},
        {"sparse": 16, "heavy": 5},
        {"yarn": True},
        {"sliding_window": 1},
        {"sliding_window": 100},
        {"index_topk": 1},
        {"index_topk": 64},
        {"index_head_dim": 64, "head_dim": 64, "partial_rotary_factor": 0.25},
        {"o_groups": 4, "num_attention_heads": 8},
        {"hc_mult": 4, "hc_sinkhorn_iters": 3},
        {"hc_eps": 0.05},
        {"layer_types": (WINDOW,) * 4},
        {"layer_types": (HEAVY, HEAVY, SPARSE, HEAVY), "mlp_layer_types": ("hash_moe",) * 4},
        {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
        {"swiglu_limit": 0.5},
        {"rope_theta": 100.0, "compress_rope_theta": 500.0},
        {"tie_word_embeddings": True},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items())[:60],
)
def test_every_shape_is_the_configurations(changes: dict[str, Any], tmp_path: Path) -> None:
    check_numbers("deepseek_v4", tmp_path, **changes)


def test_the_choice_of_blocks_and_the_blocks_are_what_is_tested() -> None:
    plain = reference("deepseek_v4", tokens())
    for changes in ({"index_topk": 64}, {"heavy": 100}, {"sparse": 100}):
        assert float((plain - reference("deepseek_v4", tokens(), **changes)).abs().max()) > 0.1


def test_sequences_of_one_batch_close_their_own_blocks(tmp_path: Path) -> None:
    write("deepseek_v4", tmp_path)
    engine = open_engine(tmp_path)
    ids = (tokens(seed=1), tokens(seed=2), tokens(seed=3))
    seqs = [engine.create() for _ in ids]
    # They begin apart, so that their blocks never close together.
    for seq, past, count in zip(seqs, ids, (21, 6, 11), strict=True):
        engine.feed(seq, past[:count])
    starts = dict(zip(seqs, (21, 6, 11), strict=True))
    for _ in range(8):
        work = {seq: past[starts[seq] : starts[seq] + 5] for seq, past in zip(seqs, ids, strict=True)}
        engine.advance(work)
        starts = {seq: start + 5 for seq, start in starts.items()}
        for seq, past in zip(seqs, ids, strict=True):
            logits = engine.logits(seq)
            assert logits is not None
            theirs = reference("deepseek_v4", past[: starts[seq]])[-1]
            assert float((logits - theirs).abs().max()) < 1e-4


def test_quantized_rows_of_every_part_stay_near(tmp_path: Path) -> None:
    """Rows are wide enough to be rotated, values among them: what was not turned back would be far off."""
    wide = {"head_dim": 64, "index_head_dim": 64, "index_topk": 8}
    write("deepseek_v4", tmp_path, **wide)
    theirs = reference("deepseek_v4", tokens(), **wide)
    ours = []
    for row_type in ("q8_0", "q4_0"):
        engine = open_engine(tmp_path, type_k=row_type, type_v=row_type)
        ours.append(torch.cat([logits for _, logits in read_all(engine, tokens(), [40] + [1] * 24)]))
    fine, coarse = (float((one - theirs).square().mean().sqrt()) for one in ours)
    assert 1e-5 < fine < 0.05 < coarse < 0.5


# -- the hub's checkpoint ------------------------------------------------------------------------------


def test_the_hubs_own_names_mean_the_same(tmp_path: Path) -> None:
    write("deepseek_v4", tmp_path, heavy=128)
    path = tmp_path / "model.safetensors"
    names = {"embed_tokens.weight": "embed.weight"}
    names |= {f"hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
    renamed = {}
    for name, tensor in load_file(path).items():
        bare = name.removeprefix("model.")
        renamed[names.get(bare, bare)] = tensor
    save_file(renamed, path, metadata={"format": "pt"})
    _change(tmp_path, _as_on_the_hub)
    ours = torch.cat([logits for _, logits in read_all(open_engine(tmp_path), tokens(), [LENGTH])])
    assert float((ours - reference("deepseek_v4", tokens(), heavy=128)).abs().max()) < 1e-4


def _as_on_the_hub(tree: dict[str, Any]) -> None:
    """The fields that the checkpoint has in place of the library's; there is a layer more behind the last."""
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        del tree[name]
    del tree["partial_rotary_factor"]
    tree |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 2, "qk_rope_head_dim": 16}
    tree |= {"rope_theta": 10000, "compress_rope_theta": 160000, "topk_method": "noaux_tc"}


PRO: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [128, 128, *(4, 128) * 29, 4, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 1024,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class NoTensors:
    """A configuration that has no weights beside it."""

    hparams: Mapping[str, object]
    architecture: str = "deepseek_v4"

    def has(self, name: str) -> bool:
        return False

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError(name)


def _pro(**changes: Any) -> WeightSource:
    return NoTensors({**PRO, **changes})


def test_the_pro_models_memory_follows_from_its_configuration() -> None:
    config = read_config(Fields(_pro()), n_ctx=1_048_576)
    needs = needs_of(config)
    assert needs.kind == "dsv4"
    shapes = Counter(
        (part.name, part.size, part.window.size if part.window else 0)
        if isinstance(part, RowsSpec)
        else (part.name, part.size, part.block)
        if isinstance(part, BlocksSpec)
        else (part.name, *part.shape)
        for part in needs.parts
    )
    assert shapes == {
        ("kv.k", 512, 128): 61,
        ("csa.k", 512, 4): 30,
        ("csa.ring", 8, 2, 1024): 30,
        ("lid.k", 128, 4): 30,
        ("lid.ring", 8, 2, 256): 30,
        ("hca.k", 512, 128): 31,
        ("hca.ring", 128, 2, 512): 31,
    }
    rings = sum(4 * math.prod(part.shape) for part in needs.parts if isinstance(part, PointSpec))
    assert rings == 30 * (64 + 16) * 2**10 + 31 * 512 * 2**10
    rotated = {
        part.name for part in needs.parts if not isinstance(part, PointSpec) if part.basis == "rotated"
    }
    assert rotated == {"lid.k"}
    for part in needs.parts:
        if isinstance(part, RowsSpec):
            assert part.value_size == part.size
            assert part.turned == Turned(config.rotaries[config.kinds[part.layer]])
    assert config.hashed == (True,) * 3 + (False,) * 58
    assert {rotary.magnitude for rotary in config.rotaries.values()} == {1.0}
    assert {rotary.n_rot for rotary in config.rotaries.values()} == {64}


def test_yarn_of_the_checkpoints_fields_is_that_of_transformers() -> None:
    yarn = build("deepseek_v4", yarn=True).model.rotary_emb
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8}
    source = _pro(head_dim=32, qk_rope_head_dim=16, rope_scaling=scaling)
    rotaries = read_config(Fields(source), n_ctx=256).rotaries
    assert torch.allclose(rotaries[SPARSE].inv_freq, yarn.compress_inv_freq, rtol=1e-6)
    assert torch.allclose(rotaries[WINDOW].inv_freq, yarn.main_inv_freq, rtol=1e-6)


def test_weights_in_fp8_are_refused() -> None:
    with pytest.raises(WeightsRefused, match="quantization_config"):
        read_config(Fields(_pro(quantization_config={"quant_method": "fp8"})), n_ctx=4096)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"compress_ratios": [0, 4, 64, *[4] * 58]}, "compress_ratios"),
        ({"compress_ratios": [4] * 60}, "compress_ratios"),
        ({"compress_ratios": None}, "compress_ratios"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**PRO["rope_scaling"], "attention_factor": 1.3}}, "attention_factor"),
        ({"compress_rates": {HEAVY: 0}}, HEAVY),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"index_head_dim": 129}, "index_head_dim"),
    ],
)
def test_shapes_that_make_no_model_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(WeightsRefused, match=field):
        read_config(Fields(_pro(**changes)), n_ctx=4096)


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention", SPARSE, HEAVY],
        "mlp_layer_types": ["moe"],
        "num_key_value_heads": 2,
        "o_groups": 3,
        "o_lora_rank": ...,
        "hc_mult": 0,
        "hc_eps": ...,
        "sliding_window": ...,
        "index_topk": ...,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "scoring_func": "softmax",
        "hidden_act": "gelu",
        "attention_bias": True,
        "quantization_config": {"quant_method": "fp8"},
    }
    check_refusals("deepseek_v4", tmp_path, cases)


def test_a_table_may_be_of_narrower_numbers(tmp_path: Path) -> None:
    write("deepseek_v4", tmp_path)
    path = tmp_path / "model.safetensors"
    held = {
        name: tensor.int() if name.endswith("tid2eid") else tensor for name, tensor in load_file(path).items()
    }
    save_file(held, path, metadata={"format": "pt"})
    check_full_pass("deepseek_v4", tmp_path)


def test_a_table_that_names_no_expert_is_refused(tmp_path: Path) -> None:
    write("deepseek_v4", tmp_path)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    next(tensor for name, tensor in held.items() if name.endswith("tid2eid"))[7, 1] = 4
    save_file(held, path, metadata={"format": "pt"})
    with pytest.raises(WeightsRefused, match="tid2eid"):
        open_engine(tmp_path)


def _change(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))

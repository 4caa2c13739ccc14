"""DeepSeek-V3 against transformers, which computes the expanded form; and the laws of latent attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsRefused
from engine.linear import Linear
from engine.models.layers import RmsNorm
from engine.models.mla import LatentAttention, LatentSizes
from engine.rope import RopeScaling, build_rotary, turn
from tests.engine.models.latent import LOSS, check_shift
from tests.oracles.base import check_numbers, open_engine, reference, tokens, write
from tests.oracles.deepseek_v3 import YARN
from tests.oracles.refusals import check_refusals

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "halves": {"rope_interleave": False},
    "no latent of queries": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "biases, no latent of queries": {"attention_bias": True, "q_lora_rank": None},
    "one group": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    "all groups": {"topk_group": 4},
    "all of a group": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4},
    "weights as they are": {"norm_topk_prob": False, "routed_scaling_factor": 0.7},
    "all dense": {"first_k_dense_replace": 3},
    "all sparse": {"first_k_dense_replace": 0, "n_shared_experts": 1},
    "value as long as a head": {"v_head_dim": 80},
    "yarn": {"rope": YARN},
    "yarn of two magnitudes": {"rope": (*YARN, ("mscale", 0.7), ("mscale_all_dim", 1.3))},
    "yarn of one magnitude": {"rope": tuple(pair for pair in YARN if pair[0] != "mscale_all_dim")},
    "yarn with a factor": {"rope": (*YARN, ("attention_factor", 1.2))},
    "linear": {"rope": (("rope_type", "linear"), ("rope_theta", 100.0), ("factor", 3.0))},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_numbers(name: str, tmp_path: Path) -> None:
    check_numbers("deepseek_v3", tmp_path, atol=2e-5, **VARIATIONS[name])


def test_tied_numbers(tmp_path: Path) -> None:
    # Logits of tied matrices are eight times as large.
    check_numbers("deepseek_v3", tmp_path, tie_word_embeddings=True)


def test_the_words_of_older_files_mean_the_same(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path, rope=YARN)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_scaling"] = {"type": "yarn", **config.pop("rope_parameters")}
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    del config["rope_scaling"]["rope_type"]
    path.write_text(json.dumps(config))
    engine, ids = open_engine(tmp_path), tokens()
    seq = engine.create()
    engine.feed(seq, ids)
    logits = engine.logits(seq)
    assert logits is not None
    theirs = reference("deepseek_v3", ids, rope=YARN)[-1]
    torch.testing.assert_close(logits, theirs, atol=2e-5, rtol=0)


def test_refusals(tmp_path: Path) -> None:
    cases = {
        "quantization_config": {"quant_method": "fp8"},
        "kv_lora_rank": ...,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 15,
        "v_head_dim": ...,
        "num_key_value_heads": 2,
        "n_group": 3,
        "topk_group": 5,
        "num_experts_per_tok": 5,
        "n_routed_experts": ...,
        "n_shared_experts": 0,
        "moe_layer_freq": 2,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "hidden_act": "gelu",
        "attention_bias": True,
        "routed_scaling_factor": ...,
        "norm_topk_prob": 1,
        "rope_interleave": "yes",
        "rope_parameters.rope_type": "spiral",
        "rope_parameters.partial_rotary_factor": 0.5,
        "rms_norm_eps": "small",
    }
    check_refusals("deepseek_v3", tmp_path, cases)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_file_must_say_how_experts_are_grouped(family: str, tmp_path: Path) -> None:
    check_refusals(family, tmp_path, {"n_group": ..., "topk_group": ...})


def test_a_latent_of_another_size_is_refused(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kv_lora_rank": 32}))
    with pytest.raises(WeightsRefused, match="kv_"):
        open_engine(tmp_path)


def test_biases_of_some_matrices_alone_are_refused(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path, attention_bias=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.o_proj.bias"]
    save_file(tensors, path)
    with pytest.raises(WeightsRefused, match=r"layers\.1\.self_attn\.o_proj"):
        open_engine(tmp_path)


def test_meaning_has_every_number_that_rows_depend_on(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path, rope=YARN)
    meaning = open_engine(tmp_path).fingerprint.meaning
    for name in ("kv_lora_rank", "qk_rope_head_dim", "rope_interleave", "rope_parameters.mscale_all_dim"):
        assert any(key.endswith(f"config.{name}") for key in meaning), name


def test_a_row_is_all_that_a_token_leaves(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path)
    assert {(part.name, part.shape) for part in open_engine(tmp_path).layout} == {
        (f"kv.k.{layer:02}", (1, 128)) for layer in range(3)
    }


@pytest.mark.parametrize("dtype", LOSS)
def test_shifted_rows_are_those_of_the_new_positions(dtype: str, tmp_path: Path) -> None:
    check_shift("deepseek_v3", tmp_path, dtype)


# -- the law of absorption ---------------------------------------------------------------------------------

SIZES = LatentSizes(width=20, num_heads=3, q_rank=None, kv_rank=8, nope=5, rope=4, value=7)
TOKENS = 9


class Dense:
    """A view of one sequence from its start, computed plainly in float64."""

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float, chosen: Any = None) -> torch.Tensor:
        scores = torch.einsum("thd,sd->hts", q.double(), k[:, 0].double()) * scale
        ahead = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return torch.einsum("hts,sd->thd", weights, k[:, 0, : SIZES.kv_rank].double()).float()


def test_absorbed_and_expanded_attention_agree() -> None:
    torch.manual_seed(0)
    rows = SIZES.num_heads * SIZES.head + SIZES.row
    down, out = torch.randn(rows, SIZES.width), torch.randn(SIZES.width, SIZES.num_heads * SIZES.value)
    k_up = torch.randn(SIZES.num_heads, SIZES.nope, SIZES.kv_rank)
    v_up = torch.randn(SIZES.num_heads, SIZES.kv_rank, SIZES.value)
    norm = RmsNorm(torch.rand(SIZES.kv_rank) + 0.5, 1e-6)
    layer = LatentAttention(
        0, SIZES, 0.3, Linear(down), None, None, norm, None, k_up, v_up, None, Linear(out)
    )
    x = torch.randn(TOKENS, SIZES.width)
    angles = build_rotary(SIZES.rope, 100.0, RopeScaling(), 64).angles(torch.arange(TOKENS))
    absorbed = layer(x, layer.lower(x, angles), angles, Dense())  # type: ignore[arg-type]

    q, kv, k = torch.split(x @ down.T, [SIZES.num_heads * SIZES.head, SIZES.kv_rank, SIZES.rope], -1)
    q_nope, q_rope = q.view(TOKENS, SIZES.num_heads, SIZES.head).split([SIZES.nope, SIZES.rope], -1)
    q_rope, k_rope = turn(q_rope, angles), turn(k[:, None], angles)[:, 0]
    latent = norm(kv)
    keys = torch.einsum("tl,hnl->thn", latent, k_up)
    values = torch.einsum("tl,hlv->thv", latent, v_up)
    scores = torch.einsum("thn,shn->hts", q_nope, keys) + torch.einsum("thr,sr->hts", q_rope, k_rope)
    ahead = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = (0.3 * scores).masked_fill(ahead, float("-inf")).softmax(-1)
    expanded = torch.einsum("hts,shv->thv", weights, values).flatten(1) @ out.T
    torch.testing.assert_close(absorbed, expanded, atol=2e-4, rtol=1e-4)

"""Hugging Face folders: every family's tensors and logits are those of transformers; damage is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ModelNotFound, UnknownArchitecture, WeightsRefused
from engine.loader import load_engine
from engine.tokenizer import open_tokenizer
from engine.weights.source import open_weights
from tests.engine.weights.folders import FAMILIES, change_config, write_folder

LENGTH = 80  # three windows and more


def logits_of_ours(folder: Path, ids: list[int]) -> torch.Tensor:
    engine = load_engine(folder, EngineConfig(dtype="f32", type_k="f32", type_v="f32", n_ctx=256))
    seq = engine.create()
    engine.feed(seq, ids)
    logits = engine.logits(seq)
    assert logits is not None
    return logits


def check_logits(folder: Path, model: Any) -> None:
    ids = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits_of_ours(folder, ids), theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    check_logits(tmp_path, write_folder(tmp_path, family))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 7.0,
            "original_max_position_embeddings": 256,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    ],
    ids=lambda rope: f"{rope['rope_type']}{len(rope)}",
)
def test_every_rope_scaling_means_what_it_means_in_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    model = write_folder(tmp_path, "llama", rope_parameters={"rope_theta": 5000.0, **rope})
    check_logits(tmp_path, model)


def test_longrope_tables_become_tensors(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    table = {"rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.5] * 8}
    change_config(tmp_path, rope_parameters={"rope_theta": 1e4, **table}, original_max_position_embeddings=64)
    weights = open_weights(tmp_path)
    assert weights.tensor("rope_factors_long.weight", torch.float32).tolist() == [2.0] * 8
    assert weights.shape("rope_factors_short.weight") == (8,)
    assert weights.hparams["rope.scaling.type"] == "longrope"
    assert weights.hparams["rope.scaling.factor"] == 4.0


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_the_file_under_our_names(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, family)
    stored = load_file(tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    gemma = family == "gemma3_text"
    layer = "model.layers.1."
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_q.weight": layer + "self_attn.q_proj.weight",
        "blk.1.attn_output.weight": layer + "self_attn.o_proj.weight",
        "blk.1.ffn_down.weight": layer + "mlp.down_proj.weight",
        "blk.1.attn_norm.weight": layer + "input_layernorm.weight",
        "blk.1.ffn_norm.weight": layer
        + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm")
        + ".weight",
    }
    for ours, theirs in pairs.items():
        factor_less_one = gemma and "norm" in ours
        expected = stored[theirs] + 1.0 if factor_less_one else stored[theirs]
        assert torch.equal(weights.tensor(ours, torch.float32), expected), ours
        assert weights.shape(ours) == tuple(expected.shape)
    # Nothing in the file is left behind.
    assert len(weights.names()) == len(stored)


def test_a_gemma_norm_is_added_to_before_it_is_rounded(tmp_path: Path) -> None:
    write_folder(tmp_path, "gemma3_text")
    stored = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    ours = open_weights(tmp_path).tensor("output_norm.weight", torch.bfloat16)
    assert torch.equal(ours, (stored + 1.0).to(torch.bfloat16))


def test_a_tensor_is_the_callers_own(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    weights = open_weights(tmp_path)
    weights.tensor("output_norm.weight", torch.float32).zero_()
    assert weights.tensor("output_norm.weight", torch.float32).abs().sum() > 0


def test_a_tied_model_has_no_output_matrix(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen2")
    assert open_weights(tmp_path).hparams["tie_word_embeddings"] is True
    assert not open_weights(tmp_path).has("output.weight")
    # Some files hold a copy all the same; transformers does not read it.
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, "lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert not open_weights(tmp_path).has("output.weight")


def test_shards_are_one_model(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    one = open_weights(tmp_path)
    tensors = {name: one.tensor(name, torch.float32) for name in one.names()}
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(stored)
    split = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in split.items():
        save_file({name: stored[name].contiguous() for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in split.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    two = open_weights(tmp_path)
    assert two.names() == one.names()
    assert all(torch.equal(two.tensor(name, torch.float32), value) for name, value in tensors.items())


def test_the_text_model_inside_a_model_that_sees_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path, "gemma3_text")
    plain = open_weights(tmp_path)
    expected = {name: plain.tensor(name, torch.float32) for name in plain.names()}
    stored = load_file(tmp_path / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        inner = {name.replace("model.", prefix, 1): value for name, value in stored.items()}
        inner["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(4)
        save_file(inner, tmp_path / "model.safetensors")
        outer = open_weights(tmp_path)
        assert outer.names() == plain.names()
        assert all(torch.equal(outer.tensor(n, torch.float32), value) for n, value in expected.items())


def test_the_digest_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        write_folder(folder, "llama")
    stored = load_file(third / "model.safetensors")
    stored["model.norm.weight"][0] += 1
    save_file(stored, third / "model.safetensors")
    assert open_weights(first).digest == open_weights(second).digest
    assert open_weights(first).digest != open_weights(third).digest
    change_config(second, rms_norm_eps=1e-3)
    assert open_weights(first).digest != open_weights(second).digest


def test_the_tokenizer_and_its_settings_come_from_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    tokenizer = open_tokenizer(open_weights(tmp_path).tokenizer_data)
    text = "héllo <|turn|> 🎶"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 258 not in tokenizer.encode(text)
    assert tokenizer.encode_special("<|turn|>") == [258]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (256, 257, True)
    assert tokenizer.end_ids == {257, 258}


def test_a_chat_template_is_found_where_folders_keep_it(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    assert "<|turn|>" in (open_weights(tmp_path).chat_template or "")
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert open_weights(tmp_path).chat_template == "newest"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_weights(tmp_path).chat_template == "yes"
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_weights(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert open_weights(tmp_path).chat_template == "old"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_folder(folder, "llama")
    return folder


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "relu"}, "hidden_act: relu"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "fast"}}, "fast"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": {"a": 1}}, "hidden_size"),
        ({"num_attention_heads": 0}, "head_count"),
        ({"rms_norm_eps": "small"}, "rms_epsilon"),
    ],
)
def test_a_config_that_the_engine_cannot_follow_is_refused_by_its_field(
    change: dict[str, Any], said: str, broken: Path
) -> None:
    change_config(broken, **change)
    with pytest.raises(WeightsRefused, match=re.escape(said)):
        _ = open_weights(broken).hparams


def test_windows_without_a_regular_pattern_are_refused(broken: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    change_config(broken, model_type="mistral", layer_types=kinds, sliding_window=8)
    with pytest.raises(WeightsRefused, match="layer_types"):
        _ = open_weights(broken).hparams


def test_an_unknown_family_is_refused_by_name_with_those_there_are(broken: Path) -> None:
    change_config(broken, model_type="bloom")
    with pytest.raises(UnknownArchitecture, match=r"bloom.*gemma3.*llama.*qwen3"):
        load_engine(broken)


def test_damaged_files_are_refused(broken: Path) -> None:
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"", b"x" * 7, b"\xff" * 64, whole[: len(whole) // 2], whole[:100], whole + b"more"):
        weights.write_bytes(damaged)
        with pytest.raises(WeightsRefused, match=r"model\.safetensors"):
            open_weights(broken).names()
    weights.unlink()
    with pytest.raises(WeightsRefused, match="no safetensors"):
        open_weights(broken).names()
    (broken / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsRefused, match="pickled"):
        open_weights(broken).names()


@pytest.mark.parametrize("name", ["../b/model.safetensors", "{other}", "/etc/passwd", "..", "gone.bin"])
def test_an_index_cannot_name_files_outside_of_its_folder(name: str, broken: Path, llama: Path) -> None:
    name = name.format(other=llama / "model.safetensors")
    (broken.parent / "b").mkdir(exist_ok=True)
    (broken.parent / "b" / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    index = {"weight_map": {"model.norm.weight": name}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsRefused, match="names the file"):
        open_weights(broken).names()


def test_a_shard_that_is_missing_is_named(broken: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsRefused, match=r"gone\.safetensors is missing"):
        open_weights(broken).names()


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, broken: Path) -> None:
    (broken / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(WeightsRefused, match=r"config\.json"):
        open_weights(broken)


def test_what_is_missing_is_named(broken: Path) -> None:
    with pytest.raises(WeightsRefused, match=r"blk\.7\.attn_q\.weight"):
        open_weights(broken).tensor("blk.7.attn_q.weight", torch.float32)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(WeightsRefused, match=r"tokenizer\.json"):
        _ = open_weights(broken).tokenizer_data
    stored = load_file(broken / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, broken / "model.safetensors")
    with pytest.raises(WeightsRefused, match="lm_head"):
        _ = open_weights(broken).hparams
    (broken / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        open_weights(broken)


def test_a_tensor_of_whole_numbers_is_refused(broken: Path) -> None:
    stored = load_file(broken / "model.safetensors")
    stored["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(stored, broken / "model.safetensors")
    with pytest.raises(WeightsRefused, match="I8"):
        open_weights(broken).tensor("output_norm.weight", torch.float32)

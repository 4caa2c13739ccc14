"""What files of the hub have in other words or another layout than transformers writes them today, of
several families."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.oracles.base import write
from tests.oracles.older import check_full_pass

OLDER = {
    "linear_attention": "mamba",
    "full_attention": "attention",
    "indexed_attention": "deepseek_sparse_attention",
}


@pytest.mark.parametrize(
    ("family", "words"),
    [
        *(
            (family, OLDER)
            for family in ("deepseek_v32", "glm5_next", "glm_moe_dsa", "kimi_linear", "qwen3_next")
        ),
        ("qwen4_exp", {"indexed_attention": "qwen_sparse_attention"}),
    ],
)
def test_kinds_of_layers_have_older_names(family: str, words: dict[str, str], tmp_path: Path) -> None:
    write(family, tmp_path)
    path = tmp_path / "config.json"
    tree = json.loads(path.read_text())
    inner = tree.get("text_config", tree)
    older = [words.get(kind, kind) for kind in inner["layer_types"]]
    assert older != inner["layer_types"]
    inner["layer_types"] = older
    path.write_text(json.dumps(tree))
    check_full_pass(family, tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "jamba", "qwen3_next", "qwen4_exp"])
def test_experts_of_a_layer_may_be_in_two_tensors(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name in list(held):
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found:
            experts[found[1]][found[3]][int(found[2])] = held.pop(name)
    assert experts
    for prefix, parts in experts.items():
        gate, up, down = (
            torch.stack([parts[part][number] for number in sorted(parts[part])])
            for part in ("gate", "up", "down")
        )
        held |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    save_file(held, path)
    check_full_pass(family, tmp_path)

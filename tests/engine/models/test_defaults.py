"""What a file means that leaves a field out: the engine takes what the library's configuration does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.base import Placement
from engine.models.fields import Fields
from engine.models.table import HUB_NAMED, build_model
from engine.weights.source import open_weights
from tests.oracles.base import write

#: sizes that follow from others here: with a wrong one no tensor has the shape that is asked for
_SIZES = frozenset(
    {
        "attention_head_dim",
        "head_dim",
        "intermediate_size",
        "lru_width",
        "mamba_d_head",
        "mamba_d_ssm",
        "mamba_dt_rank",
        "mamba_head_dim",
        "mamba_headdim",
        "num_key_value_heads",
        "ple_embed_dim",
        "qk_head_dim",
        "qk_rope_head_dim",
        "rotary_dim",
        "time_step_rank",
        "zero_expert_num",
    }
)
#: other words for the same, and what must be given where it would not mean this
_OTHERWISE = frozenset(
    {"max_position_embeddings", "model_max_length", "position_embedding_type", "time_step_limit"}
)
_GIVEN = {
    "deepseek_v3": {"n_group", "topk_group"},
    "deepseek_v32": {"n_group", "topk_group"},
}

FAMILIES = sorted({name.removesuffix("_text").removesuffix("_vl") for name in HUB_NAMED})


class _Read:
    """Notes the default of every field of the outermost object that is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.defaults: dict[str, list[Any]] = {}
        get, only = Fields._get, Fields.only

        def noting_get(fields: Fields, name: str, default: Any) -> Any:
            self._note(fields, name, default)
            return get(fields, name, default)

        def noting_only(fields: Fields, name: str, value: Any, default: Any = None) -> None:
            self._note(fields, name, default)
            only(fields, name, value, default)

        monkeypatch.setattr(Fields, "_get", noting_get)
        monkeypatch.setattr(Fields, "only", noting_only)

    def _note(self, fields: Fields, name: str, default: Any) -> None:
        if not fields._path and default is not None:
            self.defaults.setdefault(name, []).append(default)

    def others(self, config: dict[str, Any]) -> Iterator[tuple[str, list[Any], Any]]:
        """Fields that the library's configuration has, with another default. Null is none: it follows from
        other fields then."""
        for name, defaults in sorted(self.defaults.items()):
            if name in _SIZES | _OTHERWISE or config.get(name) is None:
                continue
            if config[name] not in defaults:
                yield name, defaults, config[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_left_out_means_what_it_means_elsewhere(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(family, tmp_path)
    read = _Read(monkeypatch)
    build_model(open_weights(tmp_path), Placement(torch.float32, torch.device("cpu"), 96))
    _, config = importlib.import_module(f"tests.oracles.{family}").make()
    plain = type(config.get_text_config())().to_dict()
    assert {name for name, _, _ in read.others(plain)} == _GIVEN.get(family, set())

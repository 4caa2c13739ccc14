"""What a hosted model is told apart by: every weight, and what its configuration means."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.errors import WeightsRefused
from engine.hosted import digests
from engine.hosted.digests import digest_of_config, digest_of_weights, making_of
from tests.engine.hosted.models import Model, tiny


@torch.no_grad()
def _last_weight(model: Model) -> None:
    model.lm_head.weight[-1, -1] += 1e-3


@torch.no_grad()
def _first_weight(model: Model) -> None:
    model.model.embed_tokens.weight[0, 0] += 1e-3


@torch.no_grad()
def _two_of_a_shape(model: Model) -> None:
    layers = model.model.layers
    layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight = (
        layers[1].mlp.up_proj.weight,
        layers[0].mlp.up_proj.weight,
    )


def _dtype(model: Model) -> None:
    torch.nn.Module.to(model, torch.bfloat16)


@pytest.mark.parametrize("change", [_last_weight, _first_weight, _two_of_a_shape, _dtype])
def test_no_change_of_a_weight_goes_unnoticed(change: Callable[[Model], None]) -> None:
    model = tiny("llama")
    before = digest_of_weights(model)
    assert digest_of_weights(tiny("llama")) == before
    change(model)
    assert digest_of_weights(model) != before


def test_how_much_is_on_the_host_at_once_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("bamba", torch.bfloat16)
    whole = digest_of_weights(model)
    monkeypatch.setattr(digests, "_PIECE", 100)
    assert digest_of_weights(model) == whole


def test_weights_that_are_not_in_memory_are_refused() -> None:
    with pytest.raises(WeightsRefused, match=r"not in memory.*say what the weights are"):
        digest_of_weights(torch.nn.Module.to(tiny("llama"), "meta"))


def test_a_configuration_is_what_it_means_not_where_it_came_from() -> None:
    model = tiny("llama")
    before = digest_of_config(model)
    model.config._name_or_path = "elsewhere/model"
    model.config.use_cache = False
    model.set_attn_implementation("eager")
    assert digest_of_config(model) == before
    assert making_of(model)["attention"] == "eager"
    assert digest_of_config(tiny("llama", rms_norm_eps=1e-5)) != before
    theta = {"rope_type": "default", "rope_theta": 5e5}
    assert digest_of_config(tiny("llama", rope_parameters=theta)) != before

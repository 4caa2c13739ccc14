"""A rank keeps its share of the weights, and nothing that it was cut from."""

from __future__ import annotations

import gc
import types

import pytest
import torch

from engine.models.base import Model, Placement
from engine.models.table import build_model
from engine.parallel.share import Share
from engine.weights.source import open_weights
from tests.exact.members import folder

FAMILIES = (
    *("llama", "phi3", "gemma3", "gemma4", "lfm2", "deepseek_v3", "deepseek_v4", "minimax_m3", "glm5_next"),
    *("gpt_oss", "llama4", "qwen3_next", "kimi_linear", "nemotron_h"),
)


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed matrices could not be looked into."""
    monkeypatch.setattr("engine.linear.can_pack", lambda: False)


class Silent:
    """Ranks that are never asked for a total."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def total(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no model is computed here")


def model_of(family: str, share: Share) -> Model:
    placement = Placement(torch.float32, torch.device("cpu"), 64, Silent(share))
    return build_model(open_weights(folder(family)), placement)


def kept(model: Model) -> dict[str, int]:
    """Bytes of all tensors that the model holds, whole storages, by whether they are of the vocabulary."""
    seen: set[int] = set()
    storages: dict[int, tuple[int, bool]] = {}
    rest: list[object] = [model]
    while rest:
        one = rest.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes(), one.shape[:1] == (model.vocab_size,)
        else:
            rest += gc.get_referents(one)
    found = storages.values()
    return {
        "vocabulary": sum(nbytes for nbytes, of_words in found if of_words),
        "layers": sum(nbytes for nbytes, of_words in found if not of_words),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_what_ranks_divide_is_kept_once(family: str) -> None:
    """What all of them have is what one rank of very many has, all but nothing of what is divided."""
    whole = kept(model_of(family, Share()))
    ranks = [kept(model_of(family, Share(rank, 4))) for rank in range(4)]
    mirrored = kept(model_of(family, Share(0, 10_000)))["layers"]
    divided = sum(rank["layers"] - mirrored for rank in ranks)
    assert divided == pytest.approx(whole["layers"] - mirrored, rel=0.01)
    assert whole["layers"] > 1.5 * mirrored
    assert ranks[0]["vocabulary"] == whole["vocabulary"]
    assert all(rank["vocabulary"] <= whole["vocabulary"] for rank in ranks)

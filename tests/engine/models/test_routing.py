"""The laws of routing against their definitions, token by token and expert by expert."""

from __future__ import annotations

import math

import pytest
import torch

from engine.models.routing import BiasedSigmoid, BiasedSoftmax, Groups, Softmax

EXPERTS, TOKENS = 12, 50


def logits() -> torch.Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))


def bias() -> torch.Tensor:
    return torch.randn(EXPERTS, generator=torch.Generator().manual_seed(4))


def allowed(scores: list[float], groups: Groups) -> set[int]:
    """Experts of the groups whose best ones add up to most."""
    size = EXPERTS // groups.count
    members = [range(group * size, group * size + size) for group in range(groups.count)]

    def score(group: range) -> float:
        return sum(sorted((scores[expert] for expert in group), reverse=True)[: groups.scored])

    return {expert for group in sorted(members, key=score)[-groups.allowed :] for expert in group}


def best(scores: list[float], among: set[int], count: int) -> set[int]:
    return set(sorted(among, key=lambda expert: scores[expert])[-count:])


def softmax(row: list[float]) -> list[float]:
    exponents = [math.exp(value) for value in row]
    return [value / sum(exponents) for value in exponents]


GROUPS = [Groups(), Groups(3, 3, 2), Groups(3, 1, 2), Groups(4, 2, 2), Groups(6, 2, 1), Groups(2, 1, 6)]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("normalised", [True, False])
def test_biased_sigmoid(groups: Groups, normalised: bool) -> None:
    num_chosen = 4 if groups.count != 6 else 3
    law = BiasedSigmoid(bias(), groups, num_chosen, normalised, 2.5)
    chosen, weights = law(logits())
    for token, row in enumerate(logits().tolist()):
        plain = [1 / (1 + math.exp(-value)) for value in row]
        biased = [value + more for value, more in zip(plain, bias().tolist(), strict=True)]
        expected = best(biased, allowed(biased, groups), num_chosen)
        assert set(chosen[token].tolist()) == expected
        total = sum(plain[expert] for expert in expected) if normalised else 1.0
        shares = [2.5 * plain[expert] / total for expert in chosen[token].tolist()]
        torch.testing.assert_close(weights[token], torch.tensor(shares))


@pytest.mark.parametrize("groups", GROUPS)
def test_softmax(groups: Groups) -> None:
    num_chosen = 4 if groups.count != 6 else 3
    chosen, weights = Softmax(groups, num_chosen, 1.5)(logits())
    for token, row in enumerate(logits().tolist()):
        shares = softmax(row)
        assert set(chosen[token].tolist()) == best(shares, allowed(shares, groups), num_chosen)
        taken = torch.tensor([1.5 * shares[expert] for expert in chosen[token].tolist()])
        torch.testing.assert_close(weights[token], taken)


def test_biased_softmax() -> None:
    chosen, weights = BiasedSoftmax(bias() / 10, 3, 6.0)(logits())
    moved = 0
    for token, row in enumerate(logits().tolist()):
        shares = softmax(row)
        biased = [share + more / 10 for share, more in zip(shares, bias().tolist(), strict=True)]
        assert set(chosen[token].tolist()) == best(biased, set(range(EXPERTS)), 3)
        moved += set(chosen[token].tolist()) != best(shares, set(range(EXPERTS)), 3)
        taken = torch.tensor([6.0 * shares[expert] for expert in chosen[token].tolist()])
        torch.testing.assert_close(weights[token], taken)
    assert moved > 5, "the bias does choose"


def test_what_the_bias_chooses_does_not_weigh_more() -> None:
    pushed = torch.zeros(EXPERTS)
    pushed[7] = 100.0
    chosen, weights = BiasedSigmoid(pushed, Groups(), 2, True, 1.0)(torch.zeros(1, EXPERTS))
    assert 7 in chosen.tolist()[0]
    assert weights.tolist() == [[0.5, 0.5]]

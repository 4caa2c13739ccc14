"""Each knob of the sampler is a law about which tokens come, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, EngineError
from engine.fingerprint import ENGINE_VERSION
from engine.sampler import sample, uniform
from engine.state import SamplerParams

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 1.5, -0.5, 2.5, 0.0])
DRAWS = 4000
#: chi-square that chance exceeds once in a thousand, by degrees of freedom
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 15: 37.70}


def drawn(params: SamplerParams, logits: torch.Tensor = LOGITS) -> Counter[int]:
    return Counter(sample(logits, params, (), position) for position in range(DRAWS))


def check(counts: Counter[int], expected: dict[int, float]) -> None:
    """The ids drawn are the keys of `expected`, as often as its probabilities say."""
    assert set(counts) <= set(expected)
    total = sum(expected.values())
    chi = sum((counts[i] - DRAWS * p / total) ** 2 / (DRAWS * p / total) for i, p in expected.items())
    if len(expected) > 1:
        assert chi < CHI_SQUARE[len(expected) - 1]


def softmax(logits: torch.Tensor = LOGITS, temperature: float = 1.0) -> dict[int, float]:
    return dict(enumerate((logits.double() / temperature).softmax(-1).tolist()))


def best(count: int, probabilities: dict[int, float]) -> dict[int, float]:
    return dict(sorted(probabilities.items(), key=lambda item: -item[1])[:count])


def test_greedy_takes_the_best_and_of_equals_the_lowest_id() -> None:
    assert sample(LOGITS, SamplerParams(), (), 0) == 3
    assert sample(torch.tensor([1.0, 7.0, 7.0, 7.0]), SamplerParams(), (), 0) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(temperature: float) -> None:
    check(drawn(SamplerParams(temperature=temperature, seed=1)), softmax(temperature=temperature))


def test_a_vanishing_temperature_is_greedy() -> None:
    for temperature in (1e-3, 1e-310):
        assert set(drawn(SamplerParams(temperature=temperature))) == {3}


@pytest.mark.parametrize("top_k", [1, 3, 7, 8, 100])
def test_top_k_keeps_the_k_best_in_their_proportions(top_k: int) -> None:
    check(drawn(SamplerParams(temperature=1, top_k=top_k, seed=2)), best(top_k, softmax()))


def test_of_equals_at_the_edge_of_top_k_the_lowest_ids_stay() -> None:
    logits = torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0])
    assert set(drawn(SamplerParams(temperature=3, top_k=3), logits)) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1e-9, 0.4, 0.7, 0.95])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float) -> None:
    probabilities = best(8, softmax())
    kept: dict[int, float] = {}
    for token, probability in probabilities.items():
        if sum(kept.values()) >= top_p:
            break
        kept[token] = probability
    check(drawn(SamplerParams(temperature=1, top_p=top_p, seed=3)), kept)


def test_top_p_that_is_met_exactly_takes_no_more() -> None:
    assert set(drawn(SamplerParams(temperature=1, top_p=0.5), torch.zeros(2))) == {0}


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_keeps_what_is_that_likely_beside_the_best(min_p: float) -> None:
    probabilities = softmax()
    kept = {i: p for i, p in probabilities.items() if p >= min_p * max(probabilities.values())}
    assert 0 < len(kept) < 8
    check(drawn(SamplerParams(temperature=1, min_p=min_p, seed=4)), kept)


@pytest.mark.parametrize("knob", [{"top_p": 0.7}, {"min_p": 0.3}])
def test_what_is_kept_does_not_hang_on_the_temperature(knob: dict[str, float]) -> None:
    cold = drawn(SamplerParams(temperature=1, **knob))
    hot = drawn(SamplerParams(temperature=10, **knob))
    assert set(cold) == set(hot)


def test_top_p_counts_the_mass_of_what_top_k_left() -> None:
    three = best(3, softmax())
    total = sum(three.values())
    mass = sum(best(2, softmax()).values()) / total
    params = SamplerParams(temperature=1, top_k=3, top_p=mass - 1e-6, seed=5)
    check(drawn(params), best(2, softmax()))


def test_a_bias_is_added_and_minus_infinity_bans() -> None:
    params = SamplerParams(temperature=1, logit_bias=((3, float("-inf")), (1, 2.5)), seed=6)
    biased = LOGITS.clone()
    biased[1] += 2.5
    biased[3] = float("-inf")
    check(drawn(params), {i: p for i, p in softmax(biased).items() if p})


def test_a_bias_on_an_id_that_is_none_does_nothing() -> None:
    plain = SamplerParams(temperature=1)
    biased = SamplerParams(temperature=1, logit_bias=((8, 50.0), (-1, 50.0)))
    assert drawn(plain) == drawn(biased)


def penalised(logits: torch.Tensor, params: SamplerParams, history: Sequence[int]) -> list[float]:
    """The penalties as they are defined, one token at a time."""
    scores = [float(x) for x in logits]
    recent = list(history)[len(history) - min(len(history), params.penalty_last_n) :]
    for token in set(recent):
        count = recent.count(token)
        if scores[token] > 0:
            scores[token] /= params.repeat_penalty
        else:
            scores[token] *= params.repeat_penalty
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


@pytest.mark.parametrize("seed", range(8))
def test_penalties_are_their_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    params = SamplerParams(
        repeat_penalty=float(random.choice([1.0, 0.8, 1.3])),
        presence_penalty=float(random.choice([0.0, 0.4, -0.5])),
        frequency_penalty=float(random.choice([0.0, 0.3, -0.2])),
        penalty_last_n=int(random.choice([0, 1, 5, 64])),
    )
    for _ in range(50):
        history = random.integers(0, 8, random.integers(0, 20)).tolist()
        for logits in (LOGITS, LOGITS - 2.8, LOGITS - 4):  # of both signs, and all below zero
            assert sample(logits, params, history, 0) == int(np.argmax(penalised(logits, params, history)))


def test_penalties_see_the_last_n_alone() -> None:
    params = SamplerParams(presence_penalty=10.0, penalty_last_n=2)
    assert sample(LOGITS, params, (6, 3, 0, 1), 0) == 3
    assert sample(LOGITS, params, (6, 0, 1, 3), 0) == 6


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0])
@pytest.mark.parametrize(
    "knobs",
    [
        {"repeat_penalty": 5e-324},
        {"repeat_penalty": 1e308},
        {"frequency_penalty": 1e308},
        {"frequency_penalty": -1e308},
        {"presence_penalty": -1.7e308, "frequency_penalty": -1.7e308},
        {"logit_bias": ((1, 1.7e308), (2, -1.7e308), (3, float("-inf"))), "repeat_penalty": 5e-324},
    ],
)
def test_however_large_a_knob_is_a_token_that_may_be_said_is(
    knobs: dict[str, float], temperature: float
) -> None:
    logits = torch.tensor([1.0, 2.0, -3.0, 4.0, 0.0])
    params = SamplerParams(temperature=temperature, **knobs)  # type: ignore[arg-type]
    token = sample(logits, params, [0, 1, 1, 2, 2, 2, 3, 3], 8)
    assert 0 <= token < len(logits)
    assert token not in [banned for banned, bias in params.logit_bias if bias == float("-inf")]


def test_a_draw_is_a_function_of_seed_and_position_alone() -> None:
    params = SamplerParams(temperature=1, seed=7)
    first = [sample(LOGITS, params, (), position) for position in range(50)]
    backwards = [sample(LOGITS, params, (1, 2), position) for position in reversed(range(50))]
    assert first == backwards[::-1]
    assert first != [sample(LOGITS, SamplerParams(temperature=1, seed=8), (), p) for p in range(50)]


def test_draws_are_even_along_positions_seeds_and_ids() -> None:
    one = np.array([5])
    for numbers in (
        [float(uniform(3, p, one)[0]) for p in range(DRAWS)],
        [float(uniform(s, 17, one)[0]) for s in range(DRAWS)],
        uniform(3, 17, np.arange(DRAWS)).tolist(),
    ):
        assert all(0 < number < 1 for number in numbers)
        check(Counter(int(number * 16) for number in numbers), dict.fromkeys(range(16), 1 / 16))


def test_what_one_id_draws_says_nothing_of_another() -> None:
    pairs = np.stack([uniform(seed, 4, np.array([6, 7])) for seed in range(DRAWS)])
    quarters = Counter((int(a * 4), int(b * 4)) for a, b in pairs)
    check(quarters, {(a, b): 1 / 16 for a in range(4) for b in range(4)})


def test_draws_never_change() -> None:
    """Stored conversations go on with the draws that they would have had; others need another version of the
    engine, so that a resume says it."""
    keys = ((0, 0, 0), (1, 0, 7), (0, 1, 49151), (2**64 - 1, 2**40, 300000))
    told = [0.617330984170188, 0.2609970434388101, 0.565961848281727, 0.8486424224796638]
    drawn = [float(uniform(seed, position, np.array([token]))[0]) for seed, position, token in keys]
    assert drawn == pytest.approx(told, abs=1e-15)
    assert ENGINE_VERSION == "3"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    for params in (SamplerParams(), SamplerParams(temperature=1, repeat_penalty=1.1)):
        with pytest.raises(EngineError, match="not numbers"):
            sample(torch.tensor([0.0, bad, 1.0]), params, (1,), 0)


def test_a_token_that_the_model_rules_out_is_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[6] = float("-inf")
    params = SamplerParams(temperature=5, repeat_penalty=1.2, seed=9)
    assert 6 not in drawn(params, logits)


def test_banning_every_token_is_refused() -> None:
    ban = tuple((token, float("-inf")) for token in range(8))
    with pytest.raises(EngineError, match="no token"):
        sample(LOGITS, SamplerParams(logit_bias=ban), (), 0)


def test_the_logits_are_left_as_they_are() -> None:
    logits = LOGITS.clone()
    sample(logits, SamplerParams(temperature=1, logit_bias=((3, 1.0),), repeat_penalty=2.0), (3,), 0)
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize(
    "knob",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repeat_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"penalty_last_n": -1},
        {"logit_bias": ((0, float("nan")),)},
        {"logit_bias": ((0, float("inf")),)},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(knob: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(knob))):
        SamplerParams(**knob)  # type: ignore[arg-type]

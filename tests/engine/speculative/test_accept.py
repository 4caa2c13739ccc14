"""What is said is the target's own, whatever was guessed."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from engine.errors import EngineError
from engine.sampler import sample
from engine.speculative.accept import accept
from engine.state import SamplerParams

GREEDY = SamplerParams()


def rows(*best: int, vocab: int = 8) -> torch.Tensor:
    """Logits whose largest is that of each id given."""
    return torch.stack([torch.nn.functional.one_hot(torch.tensor(i), vocab).float() for i in best])


def test_all_guesses_that_the_target_says_too_are_kept_and_one_token_more() -> None:
    assert accept(rows(3, 4, 5), (3, 4), GREEDY, (1,), ()) == (3, 4, 5)


@pytest.mark.parametrize(("guesses", "said"), [((7, 4), (3,)), ((3, 7), (3, 4)), ((), (3,))])
def test_the_first_wrong_guess_ends_it_and_the_targets_token_stands_there(
    guesses: tuple[int, ...], said: tuple[int, ...]
) -> None:
    assert accept(rows(3, 4, 5)[: len(guesses) + 1], guesses, GREEDY, (1,), ()) == said


def test_nothing_follows_an_end() -> None:
    assert accept(rows(3, 4, 5), (3, 4), GREEDY, (1,), {3}) == (3,)
    assert accept(rows(3, 4, 5), (3, 4), GREEDY, (1,), {5}) == (3, 4, 5)


def test_penalties_see_the_guesses_that_came_before() -> None:
    params = SamplerParams(repeat_penalty=100.0)
    logits = torch.tensor([[0.0, 5.0, 4.0], [0.0, 5.0, 4.0], [0.1, 5.0, 4.0]])
    assert accept(logits, (1, 2), params, (), ()) == (1, 2, 0)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(EngineError):
        accept(rows(3, 4) * float("nan"), (3,), GREEDY, (1,), ())


@pytest.mark.parametrize("drafter", ["always right", "always wrong", "draws with the same numbers", "blind"])
def test_sampled_tokens_are_those_of_plain_sampling_one_by_one(drafter: str) -> None:
    generator = torch.Generator().manual_seed(7)
    for seed in range(200):
        params = SamplerParams(temperature=1.0, seed=seed)
        logits = torch.randn((4, 6), generator=generator) * 2
        plain: list[int] = []
        for row in logits:
            plain.append(sample(row, params, (0, *plain), 1 + len(plain)))
        near = logits + 0.3 * torch.randn(logits.shape, generator=generator)
        guesses = {
            "always right": plain[:3],
            "always wrong": [(token + 1) % 6 for token in plain[:3]],
            "draws with the same numbers": [sample(near[i], params, (), 1 + i) for i in range(3)],
            "blind": torch.randint(0, 6, (3,), generator=generator).tolist(),
        }[drafter]
        said = accept(logits, guesses, params, (0,), ())
        assert list(said) == plain[: len(said)]
        wrong = [i for i in range(3) if guesses[i] != plain[i]]
        assert len(said) == (wrong[0] if wrong else 3) + 1


def test_the_distribution_of_what_is_said_is_the_targets() -> None:
    """Chi-square over 6,000 seeds: a drafter that favours one token shifts nothing towards it."""
    vocab, count = 6, 6000
    target = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    # The second row does not depend on the first token, so that both have one known distribution.
    seen: list[collections.Counter[int]] = [collections.Counter(), collections.Counter()]
    reached = 0
    for seed in range(count):
        params = SamplerParams(temperature=0.8, seed=seed)
        said = accept(target, (2,), params, (0,), ())
        seen[0][said[0]] += 1
        if len(said) == 2:
            reached += 1
            seen[1][said[1]] += 1
    first, second = (torch.softmax(row.double() / 0.8, 0).numpy() for row in target)
    for counts, expected, total in ((seen[0], first, count), (seen[1], second, reached)):
        observed = np.array([counts[token] for token in range(vocab)])
        chi = float(((observed - total * expected) ** 2 / (total * expected)).sum())
        assert chi < 20.5, "p < 0.001 for five degrees of freedom"
    # A guess is right as often as the target gives it: no less is accepted than rejection sampling would.
    assert abs(reached / count - first[2]) < 0.02


def test_of_two_models_that_nearly_agree_the_same_draws_choose_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    agreed = independent = overlap = 0.0
    for seed in range(2000):
        target = torch.randn(20, generator=generator) * 2
        draft = target + 0.3 * torch.randn(20, generator=generator)
        params = SamplerParams(temperature=1.0, seed=seed)
        token = sample(target, params, (), 5)
        agreed += token == sample(draft, params, (), 5)
        independent += token == sample(draft, SamplerParams(temperature=1.0, seed=seed + 9999), (), 5)
        overlap += float(torch.minimum(target.softmax(0), draft.softmax(0)).sum())
    assert agreed > 1.5 * independent
    assert agreed > 0.75 * overlap, "rejection sampling would accept the overlap of the two"

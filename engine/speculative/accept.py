"""Which guesses are right: those that the target samples itself.

Every position has its own draw, a function of (seed, position). So the token at each of them is sampled from
the target's logits as it would be without any guess, and a guess is accepted where it is that token. What is
said is what plain decoding says, greedy or not, and its distribution is the target's whatever the drafter
does. A guess that was certain of itself is accepted as often as by rejection sampling (Leviathan et al. 2023,
Chen et al. 2023); a drafter that draws with the same numbers comes close for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from engine.sampler import sample
from engine.state import SamplerParams


def accept(
    logits: torch.Tensor,
    guesses: Sequence[int],
    params: SamplerParams,
    history: Sequence[int],
    ends: Collection[int],
) -> tuple[int, ...]:
    """The tokens that follow `history`, one at least.

    `logits` float32 [1 + guesses, vocab] follow `history`, and each of the guesses. All tokens but the last
    are guesses; none follows one of `ends`. Raises EngineError where logits are not numbers.
    """
    said = list(history)
    for index, row in enumerate(logits):
        token = sample(row, params, said, len(said))
        said.append(token)
        if index == len(guesses) or token != guesses[index] or token in ends:
            break
    return tuple(said[len(history) :])

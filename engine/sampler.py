"""From logits to the next token: a pure function of the logits, the ids so far, and the position.

The order of the steps, as most engines have it:
bias -> penalties -> top-k -> top-p -> min-p -> temperature -> draw.
top-p and min-p look at the probabilities before the temperature is applied. The draw is a function of
(seed, position) alone, so that a sampler has a state at every position and keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import EngineError
from engine.state import SamplerParams

Floats = npt.NDArray[np.float64]


def sample(logits: torch.Tensor, params: SamplerParams, history: Sequence[int], position: int) -> int:
    """The token at `position`, given float32 [vocab] `logits` and the ids before it.

    Equal logits are taken lowest id first. Raises EngineError for logits that are no numbers.
    """
    scores = logits.numpy(force=True)
    if not np.isfinite(scores.max()):  # NaN anywhere makes the largest NaN
        raise EngineError("the model's logits are not numbers: its weights or its state are damaged")
    if params.logit_bias or _penalised(params):
        scores = _adjusted(scores.astype(np.float64), params, history)
        if not np.isfinite(scores.max()):
            raise EngineError("the sampler's logit_bias leaves no token to choose")
    if params.temperature == 0:
        return int(np.argmax(scores))
    ids, kept = _candidates(scores, params)
    with np.errstate(over="ignore"):  # what is infinitely unlikely has no weight
        weights = np.exp((kept - kept[0]) / params.temperature)
    cumulative = np.cumsum(weights)
    at = np.searchsorted(cumulative, draw(params.seed, position) * cumulative[-1], side="right")
    return int(ids[min(int(at), len(ids) - 1)])


def draw(seed: int, position: int) -> float:
    """A number in [0, 1), the same on every machine for the same seed and position (Philox 4x64)."""
    random = np.random.Philox(key=seed, counter=[0, 0, 0, position])
    return (int(random.random_raw()) >> 11) / 2.0**53


def _penalised(params: SamplerParams) -> bool:
    return (params.repeat_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _adjusted(scores: Floats, params: SamplerParams, history: Sequence[int]) -> Floats:
    """Scores with the bias, and with what the last ids cost."""
    for token, bias in params.logit_bias:
        if 0 <= token < len(scores):
            scores[token] += bias
    recent = history[-params.penalty_last_n :] if params.penalty_last_n else ()
    if not _penalised(params) or not recent:
        return scores
    ids, counts = np.unique(np.asarray(recent), return_counts=True)
    known = ids < len(scores)
    ids, counts = ids[known], counts[known]
    seen = scores[ids]
    seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    scores[ids] = seen - counts * params.frequency_penalty - params.presence_penalty
    return scores


def _candidates(
    scores: npt.NDArray[np.floating], params: SamplerParams
) -> tuple[npt.NDArray[np.int64], Floats]:
    """The ids that may be drawn, best first, and their scores."""
    count = len(scores)
    if 0 < params.top_k < count:  # all that tie with the k-th are taken along, the order below decides
        floor = np.partition(scores, count - params.top_k)[count - params.top_k]
        ids = np.flatnonzero(scores >= floor)
    else:
        ids = np.arange(count)
    order = np.argsort(-scores[ids], kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    ids, kept = ids[order], scores[ids[order]].astype(np.float64)
    weights = np.exp(kept - kept[0])
    if params.top_p < 1:
        below = np.cumsum(weights) - weights  # the mass before each one: the first is always kept
        kept = kept[: int(np.searchsorted(below, params.top_p * weights.sum(), side="left"))]
    if params.min_p > 0:
        kept = kept[: int(np.count_nonzero(weights[: len(kept)] >= params.min_p))]
    return ids[: len(kept)], kept

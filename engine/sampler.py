"""From logits to the next token: a pure function of the logits, the ids so far, and the position.

The order of the steps, as most engines have it:
bias -> penalties -> (what is allowed) -> top-k -> top-p -> min-p -> temperature -> draw.
top-p and min-p look at the probabilities before the temperature is applied. The draw is a function of
(seed, position) alone, so that a sampler has a state at every position and keeps none. Every id has noise of
its own in it (Gumbel-max), so that two models that nearly agree nearly always choose the same id with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import EngineError
from engine.state import SamplerParams

Floats = npt.NDArray[np.float64]
_LARGEST = np.finfo(np.float64).max


def sample(
    logits: torch.Tensor,
    params: SamplerParams,
    history: Sequence[int],
    position: int,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> int:
    """The token at `position`, given float32 [vocab] `logits` and the ids before it; with bool [vocab]
    `allowed` one of those.

    Equal logits are taken lowest id first. Raises EngineError for logits that are no numbers.
    """
    scores = logits.numpy(force=True)
    if not np.isfinite(scores.max()):  # NaN anywhere makes the largest NaN
        raise EngineError("the model's logits are not numbers: its weights or its state are damaged")
    if params.logit_bias or _penalised(params):
        scores = _adjusted(scores.astype(np.float64), params, history)
        if not np.isfinite(scores.max()):
            raise EngineError("the sampler's logit_bias leaves no token to choose")
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
        if not np.isfinite(scores.max()):
            raise EngineError("no token of the vocabulary may be next in this reply")
    if params.temperature == 0:
        return int(np.argmax(scores))
    with np.errstate(over="ignore"):  # what is infinitely unlikely is never chosen
        ids, kept = _candidates(scores, params)
        noisy = (kept - kept[0]) / params.temperature + gumbel(params.seed, position, ids)
    return int(ids[int(np.argmax(noisy))])


def gumbel(seed: int, position: int, ids: npt.NDArray[np.int64]) -> Floats:
    """Standard Gumbel noise for each of `ids`, the same for the same seed, position and id. The largest sum
    of a logarithm and its noise falls on each id as often as it is likely."""
    noise: Floats = -np.log(-np.log(uniform(seed, position, ids)))
    return noise


def uniform(seed: int, position: int, ids: npt.NDArray[np.int64]) -> Floats:
    """Numbers in (0, 1): those of `ids` in the sequence that SplitMix64 (Steele, Lea & Flood 2014) makes from
    a start which Philox 4x64 (Salmon et al. 2011) draws from seed and position."""
    start = np.random.Philox(key=seed, counter=[0, 0, 0, position]).random_raw(1)
    x = start + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    numbers: Floats = ((x >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return numbers


def _penalised(params: SamplerParams) -> bool:
    return (params.repeat_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _adjusted(scores: Floats, params: SamplerParams, history: Sequence[int]) -> Floats:
    """Scores with the bias, and with what the last ids cost."""
    with np.errstate(over="ignore"):  # what is out of range is as likely, or unlikely, as can be said
        for token, bias in params.logit_bias:
            if 0 <= token < len(scores):
                scores[token] += bias
        return _penalties(np.minimum(scores, _LARGEST), params, history)


def _penalties(scores: Floats, params: SamplerParams, history: Sequence[int]) -> Floats:
    recent = history[-params.penalty_last_n :] if params.penalty_last_n else ()
    if not _penalised(params) or not recent:
        return scores
    ids, counts = np.unique(np.asarray(recent), return_counts=True)
    known = ids < len(scores)
    ids, counts = ids[known], counts[known]
    seen = scores[ids]
    seen = np.where(
        seen > 0, np.minimum(seen / params.repeat_penalty, _LARGEST), seen * params.repeat_penalty
    )
    often = np.clip(counts * params.frequency_penalty, -_LARGEST, _LARGEST)
    scores[ids] = np.minimum(seen - often - params.presence_penalty, _LARGEST)
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

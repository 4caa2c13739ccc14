"""A hosted model is tried before it is believed: a few tokens, put through it in several ways.

What is found out: which parts its cache has; that all of its state is in there (a cache that was rebuilt
from the bytes of its parts gives the same logits, bit for bit, also after another sequence was computed);
that it goes on from its cache as it reads all at once; and whether it does so with several tokens, or with
one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import CacheRefused, TenutoError
from engine.hosted.geometry import Cache, Geometry, StatePart, learn
from engine.hosted.model import HostedModel

#: Ids that no vocabulary is too small for, and that are seldom something special.
_TOKENS = (31, 17, 58, 40, 23, 46, 9, 61, 35, 52, 28, 44)
_OTHERS = (19, 62, 27, 50, 38)
_BEGIN = 6
#: Logits of tokens that went in together may differ from those of one at a time by so much of what the past
#: makes of them. Rounding in bfloat16 makes some hundredths; a state that is not read, a third and more.
_SAME = 0.1
#: One token at a time against all at once, a model is wrong in itself beyond this: in float32, and
#: in less, where rounding makes up to a fifth.
_RIGHT, _RIGHT_IN_LESS = 0.05, 1.0
#: Point state may be so many times as far from that of one token at a time as if all had gone in together
#: into an empty cache, which is rounding alone; and so far in any case, in parts of itself.
_ROUNDED, _EQUAL = 2.0, 1e-4


@dataclass(frozen=True, slots=True)
class Found:
    geometry: Geometry
    vocab_size: int
    singly: bool


def trial(model: HostedModel) -> Found:
    """Raises CacheRefused for a model that cannot be held whole, saying why."""
    try:
        with torch.inference_mode():
            return _tried(model)
    except TenutoError:
        raise
    except Exception as error:  # it is a stranger's program, and may raise anything
        reason = " ".join(str(error).split())[:300]
        raise CacheRefused(
            f"{model.name} cannot be called with a cache: {type(error).__name__}: {reason}"
        ) from error


def _tried(model: HostedModel) -> Found:
    cache = model.empty_cache()
    vocab_size = _put(model, cache, _TOKENS[:_BEGIN], 0).shape[-1]
    geometry = learn(model.empty_cache, cache)
    geometry.check(cache, _BEGIN)
    _prove(model, geometry, cache)
    return Found(geometry, vocab_size, _reads_singly(model, geometry))


def _prove(model: HostedModel, geometry: Geometry, cache: Cache) -> None:
    """Raises CacheRefused unless caches rebuilt from bytes go on as `cache` does, which has begun."""
    rebuilt = _rebuilt(geometry, cache)
    alone = _go_on(model, cache)
    _put(model, model.empty_cache(), _OTHERS, 0)
    again = _go_on(model, rebuilt)
    if not torch.equal(alone, again):
        raise CacheRefused(
            f"{model.name} keeps state beside its cache: what is in there alone goes on otherwise "
            f"(logits differ by {float((alone - again).abs().max()):.2g})"
        )


def _rebuilt(geometry: Geometry, cache: Cache) -> Cache:
    rows = []
    for part in (*geometry.tokens, *geometry.windows):
        held = geometry.held(part, _BEGIN)
        tensor = part.empty(held)
        part.put(tensor, 0, part.as_bytes(part.of(cache), 0, held))
        rows.append(tensor)
    states = [state.tensor(state.as_bytes(cache)) for state in geometry.states]
    return geometry.filled(_BEGIN, rows, states)


def _go_on(model: HostedModel, cache: Cache) -> torch.Tensor:
    """float32 [2, vocab]: after one token more, and after some more one by one."""
    first = _put(model, cache, _TOKENS[_BEGIN : _BEGIN + 1], _BEGIN)
    for at in range(_BEGIN + 1, len(_TOKENS)):
        last = _put(model, cache, _TOKENS[at : at + 1], at)
    return torch.cat([first, last])


def _reads_singly(model: HostedModel, geometry: Geometry) -> bool:
    """Whether several tokens that go into a cache at once are read as if there were nothing in it, or nothing
    of some of its state. Some models do that, and say nothing. Raises CacheRefused where one token at a time
    is read wrong as well."""
    by_one, together, at_once, fresh = (model.empty_cache() for _ in range(4))
    for cache in (by_one, together):
        _put(model, cache, _TOKENS[:_BEGIN], 0)
    last = _go_on(model, by_one)[1:]
    rest = _TOKENS[_BEGIN:]
    past = (_put(model, fresh, rest, 0) - last).abs().max()  # what it makes of the logits
    whole = (_put(model, at_once, _TOKENS, 0) - last).abs().max()
    if whole > past * (_RIGHT if model.dtype is torch.float32 else _RIGHT_IN_LESS):
        raise CacheRefused(
            f"{model.name} says otherwise of tokens that go into its cache one by one than of all at once "
            f"(logits differ by {float(whole):.2g})"
        )
    lost = (_put(model, together, rest, _BEGIN) - last).abs().max() > _SAME * past
    return bool(lost) or any(
        _apart(state, together, by_one) > _ROUNDED * _apart(state, at_once, by_one) + _EQUAL
        for state in geometry.states
    )


def _apart(state: StatePart, one: Cache, other: Cache) -> float:
    """How far two values of a point state are apart, in parts of the second."""
    a, b = (state.of(cache).double() for cache in (one, other))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def _put(model: HostedModel, cache: Cache, tokens: Sequence[int], start: int) -> torch.Tensor:
    """float32 [1, vocab] after the last of `tokens`."""
    positions = torch.arange(start, start + len(tokens))
    return model.call(cache, torch.tensor(tokens), positions, torch.tensor([len(tokens) - 1]))

"""Attention of some queries over exactly the rows that they may see.

The query heads of one key head are computed as rows of one product, so keys and values are never
repeated, and the inner kernel works on matrices even for a single token: with 9 heads over 3 in bf16 at
depth 1,024 it takes a sixth of the time of one product a head. Results depend on the values of q, k, v
and the mask alone, not on where they lie. Another number of threads may move the last bits: a few heads
over many keys are divided among the threads by key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Ints
from engine.cache.memory import WindowSpec

#: Bytes. What torch allocates begins at a multiple of it; what is cut out of a tensor may not.
ALIGNMENT = 64

#: A query's own copy of its rows pays where there are more keys than it sees times this: once for products
#: of fewer rows, and once for copying, which the heads share.
_WORTH, _COPYING = 1.25, 10.0
#: Values of keys that are copied at a time: what a processor's cache can hold.
_GATHERED = 2**19
#: Keys of a part where a single token sees so many that they are taken in parts, which pays from three on:
#: one step of the kernel, so that the threads have equal shares, and nothing to put together within a part.
#: Where there would be too many they are larger instead: they overlap by a key for each of them at most.
_PART, _FEWEST, _MOST = 512, 3, 32


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are formed: `scale * q·k`, then `softcap * tanh(score / softcap)` if there is one. `sinks`
    are logits, float32 [heads], that take their share of the softmax and give nothing for it."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def of(self, heads: slice) -> Scoring:
        """For some of the heads alone."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])


def build_mask(
    queries: Ints, keys: Ints, window: WindowSpec | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """0 where a query may see a key and -inf elsewhere, [queries, keys]; None where all see all.

    `queries` and `keys` are positions. A query sees what is not behind it in time, itself included.
    """
    if len(queries) == 1:
        return None
    at = torch.from_numpy(queries)[:, None]
    key_at = torch.from_numpy(keys)[None]
    visible = key_at <= at
    if window is not None:
        visible &= key_at >= torch.from_numpy(window.first_visible(queries))[:, None]
    if bool(visible.all()):
        return None
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return mask.to(device)


def grouped(mask: torch.Tensor | None, group: int) -> torch.Tensor | None:
    """`mask` for rows that are `group` heads of the same queries."""
    return mask if mask is None or group == 1 else mask.repeat(group, 1)


def narrowed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | int,
    mask: torch.Tensor | None,
    picked: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """`attend` over the keys of each query that are picked: bool [queries, keys] or [kv heads, queries,
    keys]. `v` is a number where it is the first so many values of the keys.

    Keys are masked where queries pick most of them, and else gathered for every query by itself: of 4,096
    latents 512, that takes a third of the time for 8 heads, and a ninth for 64.
    """
    group = q.shape[1] // k.shape[1]
    if k.shape[0] > int(picked.sum(-1).max()) * (_WORTH + _COPYING / group):
        seen = picked if mask is None else picked & (mask[: len(q)] == 0)
        return _gathered(q, k, v, seen, scoring)
    narrow = torch.zeros(picked.shape, dtype=k.dtype, device=k.device)
    narrow = narrow.masked_fill_(~picked, float("-inf")).repeat(*([1] * (picked.dim() - 2)), group, 1)
    values = k[..., :v] if isinstance(v, int) else v
    return attend(q, k, values, narrow if mask is None else narrow + mask, scoring)


def _gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | int, seen: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """`narrowed`, every query with a copy of the rows that it has seen."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    q = _aligned(q)
    index, missing = _listed(seen.expand(kv_heads, -1, -1) if seen.dim() == 3 else seen[None])
    step = max(1, _GATHERED // (index.shape[2] * k.shape[2]))
    out = []
    for start in range(0, len(q), step):
        some, heads = slice(start, start + step), []
        for head in range(kv_heads):
            at = head if len(index) > 1 else 0
            of_head = slice(head * group, (head + 1) * group)
            rows, scores = q[some, of_head], scoring.of(of_head)
            cells, shape = index[at, some].flatten(), (len(rows), index.shape[2], -1)
            keys = k[:, head].index_select(0, cells).view(shape)
            values = keys[..., :v] if isinstance(v, int) else v[:, head].index_select(0, cells).view(shape)
            if scores.sinks is not None:
                scores = replace(scores, sinks=scores.sinks.repeat(len(rows)))
            heads.append(_spelled_out(rows, keys, values, missing[at, some, None], scores))
        out.append(heads[0] if kv_heads == 1 else torch.cat(heads, 1))
    return torch.cat(out)


def _listed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of bool [heads, queries, keys] the numbers of the keys that each query sees, in order, and what to add
    to the scores: -inf where it sees fewer than the others. Both are [heads, queries, most]."""
    counts = seen.sum(-1)
    place = torch.arange(int(counts.max()), device=seen.device)
    missing = torch.zeros((*counts.shape, len(place)), device=seen.device)
    missing = missing.masked_fill_(place >= counts[..., None], float("-inf"))
    index = torch.zeros(missing.shape, dtype=torch.int64, device=seen.device)
    index[missing == 0] = seen.nonzero()[:, -1]
    return index, missing


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """q [tokens, heads, size], k and v [keys, kv heads, size] -> [tokens, heads, size of v].

    `mask` is `grouped` by heads / kv heads.
    """
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q = _aligned(q)
    if tokens == 1:
        rows = q.reshape(kv_heads, group, size)
    else:
        rows = q.reshape(tokens, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
    single = rows.shape[1] == 1
    if single:
        # A lone row would go through the kernel's matrix-vector product, which is four times slower.
        rows = rows.expand(kv_heads, 2, size)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if scoring.softcap is not None or scoring.sinks is not None or size != v.shape[2]:
        out = _spelled_out(rows, keys, values, mask, scoring)
    elif tokens == 1 and mask is None and len(k) >= _FEWEST * _PART and k.device.type == "cpu":
        out = _by_parts(rows, k, v, scoring.scale)
    else:
        out = scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, scale=scoring.scale
        )[0]
    if single:
        out = out[:, :1]
    if tokens == 1:
        return out.reshape(1, heads, -1)
    return out.reshape(kv_heads, group, tokens, -1).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _by_parts(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows [kv heads, rows, size] of a single token over each of equal parts of all keys, which are joined by
    the logarithms of their sums of exponentials (flash-decoding: Dao et al., 2023): for 3 key heads of 3 rows
    in bf16 three quarters of the time over 2,000 keys, and two thirds over 8,000.

    Parts overlap where the number of keys is no multiple of theirs, and a key is hidden in all but one.
    `torch` has no public function that tells these sums.
    """
    count = min(-(-len(k) // _PART), _MOST)
    step = len(k) // count
    size = len(k) - (count - 1) * step
    keys, values = (x.unfold(0, size, step).permute(0, 1, 3, 2) for x in (k, v))
    outs, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows.expand(count, -1, -1, -1),
        keys,
        values,
        attn_mask=_overlap(count, size, step, rows.dtype),
        scale=scale,
    )
    joined: torch.Tensor = (outs * sums.softmax(0)[..., None]).sum(0)
    return joined.to(rows.dtype)


@lru_cache(maxsize=8)
def _overlap(count: int, size: int, step: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask of parts of `size` keys that begin `step` apart, [count, 1, 1, size]: the layers of a pass
    share it. None where they do not overlap."""
    if size == step:
        return None
    mask = torch.zeros(count, 1, 1, size, dtype=dtype)
    mask[:-1, ..., step:] = float("-inf")
    return mask


def _aligned(q: torch.Tensor) -> torch.Tensor:
    """The float32 product of a few rows has other last bits where these do not begin at 16 bytes."""
    return q.clone() if q.data_ptr() % ALIGNMENT else q


def _spelled_out(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """The same by plain products, for what the fused kernel cannot do; the softmax is in float32."""
    scores = torch.bmm(rows, keys.transpose(1, 2)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is None:
        return torch.bmm(scores.softmax(-1).to(values.dtype), values)
    # Rows are the heads of a group one after the other, each with the same number of queries.
    kv_heads, num_rows = scores.shape[:2]
    sinks = scoring.sinks.to(scores).view(kv_heads, -1, 1)
    sinks = sinks.repeat_interleave(num_rows // sinks.shape[1], 1)
    weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return torch.bmm(weights.to(values.dtype), values)

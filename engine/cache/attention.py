"""Attention of some queries over exactly the rows that they may see.

The query heads of one key head are computed as rows of one product, so keys and values are never
repeated, and the inner kernel works on matrices even for a single token: with 9 heads over 3 in bf16 at
depth 1,024 it takes a sixth of the time of one product a head. Results depend on the values of q, k, v
and the mask alone, not on where they lie. Another number of threads may move the last bits: a few heads
over many keys are divided among the threads by key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Ints
from engine.cache.memory import WindowSpec

#: Bytes. What torch allocates begins at a multiple of it; what is cut out of a tensor may not.
ALIGNMENT = 64


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
    v: torch.Tensor,
    mask: torch.Tensor | None,
    picked: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """`attend` over the keys of each query that are picked: bool [queries, keys] or [kv heads, queries,
    keys]. All keys are read; who has one query reads no more than it has picked."""
    group = q.shape[1] // k.shape[1]
    narrow = torch.zeros(picked.shape, dtype=k.dtype, device=k.device)
    narrow = narrow.masked_fill_(~picked, float("-inf")).repeat(*([1] * (picked.dim() - 2)), group, 1)
    return attend(q, k, v, narrow if mask is None else narrow + mask, scoring)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """q [tokens, heads, size], k and v [keys, kv heads, size] -> [tokens, heads, size of v].

    `mask` is `grouped` by heads / kv heads.
    """
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if q.data_ptr() % ALIGNMENT:
        # The float32 product of a few rows has other last bits where these do not begin at 16 bytes.
        q = q.clone()
    if tokens == 1:
        rows = q.reshape(kv_heads, group, size)
    else:
        rows = q.reshape(tokens, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
    single = rows.shape[1] == 1
    if single:
        # A lone row would go through the kernel's matrix-vector product, which is four times slower.
        rows = rows.expand(kv_heads, 2, size)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if scoring.softcap is None and scoring.sinks is None and size == v.shape[2]:
        out = scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, scale=scoring.scale
        )[0]
    else:
        out = _spelled_out(rows, keys, values, mask, scoring)
    if single:
        out = out[:, :1]
    if tokens == 1:
        return out.reshape(1, heads, -1)
    return out.reshape(kv_heads, group, tokens, -1).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


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

"""Which part of a model a rank has: plain arithmetic, the same on every rank.

Whole KV heads go to a rank, with the query heads that read them: so a row of the cache is cut between heads,
and never within a block of quantized values. Where something does not divide evenly, the first ranks have
less of it, since rank 0 has the output matrix beside its part.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Inner columns go to ranks in runs of so many, where there are enough: other widths multiply more slowly.
UNIT = 64


@dataclass(frozen=True, slots=True)
class Share:
    """That of rank `rank` of `size`, counted from 0."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """Which of `count` things in a row are this rank's; it may be none of them."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def columns(self, count: int) -> range:
        """Which of `count` inner columns are this rank's, in runs of UNIT, or of a smaller power of two that
        divides them and leaves no rank without any."""
        unit = UNIT
        while unit > 1 and (count % unit or count // unit < self.size):
            unit //= 2
        runs = self.of(count // unit)
        return range(runs.start * unit, runs.stop * unit)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """Which heads of grouped-query attention are this rank's."""
        kv, group = self.of(num_kv_heads), num_heads // num_kv_heads
        return HeadShare(num_heads, num_kv_heads, range(kv.start * group, kv.stop * group), kv)

    def ends(self, count: int) -> range:
        """Which rows of the output matrix are this rank's: rank 0 has them all, and samples alone."""
        return range(count if self.rank == 0 else 0)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """KV heads `kv` of `num_kv_heads`, and the heads `q` of `num_heads` that read them."""

    num_heads: int
    num_kv_heads: int
    q: range
    kv: range

    def each(self, size: int, size_v: int) -> tuple[slice, slice, slice]:
        """This rank's rows of the matrices of q, k and v, whose heads have `size` and `size_v` values."""
        return values_of(self.q, size), values_of(self.kv, size), values_of(self.kv, size_v)

    def joined(self, size: int, size_v: int) -> tuple[slice, slice, slice]:
        """The same where the three are one matrix, q above k above v."""
        q, k, v = self.each(size, size_v)
        below_q = self.num_heads * size
        return q, moved(k, below_q), moved(v, below_q + self.num_kv_heads * size)


def values_of(things: range, size: int) -> slice:
    """Where the values of `things` of `size` values each lie."""
    return slice(things.start * size, things.stop * size)


def moved(some: slice, by: int) -> slice:
    return slice(some.start + by, some.stop + by)

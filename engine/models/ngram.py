"""Which rows of a table belong to the last few tokens: n-grams hashed, several times for every length.

Every head of an n-gram has a prime number of rows for itself, one behind the other in one table. Hashing
takes the tokens before into account, but none before the end of a text, whoever cut it into passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.batch import Ints
from engine.cache.memory import NULL_TOKEN

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_STEP = 10_007  # from one layer's seed to the next one's


@dataclass(frozen=True, slots=True)
class NgramHash:
    """`multipliers` has one for each token of the longest n-gram, the newest first; `sizes` [lengths, heads]
    how many rows each head has, bigrams first, and `offsets` where its first is. `end` is the token that ends
    a text."""

    multipliers: Ints
    sizes: Ints
    offsets: Ints
    end: int

    @property
    def num_before(self) -> int:
        """Tokens before a token that its n-grams take in."""
        return len(self.multipliers) - 1

    @property
    def num_rows(self) -> int:
        return int(self.sizes.sum())

    def __call__(self, tokens: Ints, before: Ints) -> Ints:
        """[tokens, lengths * heads] rows of the table for `tokens`, with those `before` each of them [tokens,
        num_before], oldest first.

        From the first end of text backwards, and where there is no token, all are ends.
        """
        line = np.concatenate((tokens[:, None], before[:, ::-1]), axis=1)
        line = np.where(line == NULL_TOKEN, self.end, line)
        over = np.logical_or.accumulate(line[:, 1:] == self.end, axis=1)
        line[:, 1:][over] = self.end
        mixed = np.bitwise_xor.accumulate(line * self.multipliers, axis=1)[:, 1:, None]
        return (mixed % self.sizes + self.offsets).reshape(len(tokens), -1)


def build_hash(
    index: int, longest: int, heads: int, base: int, vocab_size: int, seed: int, end: int
) -> NgramHash:
    """The hash of the `index`-th layer that has one: n-grams of 2 to `longest` tokens, each with `heads`
    heads of at least `base` rows."""
    num_heads = (longest - 1) * heads
    sizes = np.array(primes_from(base, (index + 1) * num_heads)[-num_heads:], np.int64)
    offsets = np.cumsum(sizes) - sizes
    shape = longest - 1, heads
    multipliers = multipliers_of(seed + _SEED_STEP * index, longest, vocab_size)
    return NgramHash(multipliers, sizes.reshape(shape), offsets.reshape(shape), end)


def multipliers_of(seed: int, count: int, vocab_size: int) -> Ints:
    """Odd numbers out of splitmix64 (Steele, Lea & Flood 2014), so small that a token's id times one is an
    int64."""
    bound = max(1, (2**63 - 1) // vocab_size // 2)
    drawn = (_splitmix64(seed + _GOLDEN * (number + 1)) for number in range(count))
    return np.array([2 * (value % bound) + 1 for value in drawn], np.int64)


def _splitmix64(state: int) -> int:
    value = (state + _GOLDEN) & _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31


def primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes that are at least `start`."""
    primes: list[int] = []
    candidate = max(start, 2)
    while len(primes) < count:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes

"""How the values of one kind of row are written down, and from one such form to another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.errors import FingerprintMismatch
from engine.state import DTYPES
from serialization.foreign.geometry import Pairing
from serialization.hadamard import rotate
from serialization.values import decode, encode, is_quantized


@dataclass(frozen=True, slots=True)
class Form:
    """Rows of `heads` heads of `size` values in `dtype`. RoPE turned the first `n_rot` of every head, in
    pairs by `pairing`. Every `block` values of a head are Hadamard-rotated (0: none are)."""

    dtype: str
    heads: int
    size: int
    n_rot: int = 0
    pairing: Pairing = Pairing.HALVES
    block: int = 0

    @property
    def row_nbytes(self) -> int:
        nbytes, values = DTYPES[self.dtype]
        return self.heads * self.size // values * nbytes

    @property
    def shares_scales(self) -> bool:
        """Whether values are quantized in blocks, so that none of them can be moved alone."""
        return is_quantized(self.dtype)

    @property
    def turns_pairs(self) -> bool:
        """Whether its order is another than ours, in which value i turns with i + n_rot/2."""
        return self.n_rot > 0 and self.pairing is Pairing.INTERLEAVED


@dataclass(frozen=True, slots=True)
class Moved:
    """Rows in their new form, uint8 [rows, row bytes]. `loss` is what they lost by it: the root of the
    squares of all differences over that of all values; 0.0 where every value came through."""

    data: torch.Tensor
    loss: float


def move(data: torch.Tensor, source: Form, target: Form) -> Moved:
    """Rows uint8 [rows, row bytes] of one form in another. Bytes are kept where the forms are one, and put
    in another order where no more is asked; what has to be computed is in float32, and a value that the
    target has no number for is rounded once. Raises FingerprintMismatch where rows are of another size."""
    if (source.heads, source.size, source.n_rot) != (target.heads, target.size, target.n_rot):
        raise FingerprintMismatch(
            f"rows of {source.heads} heads of {source.size} values ({source.n_rot} turned) are none of"
            f" {target.heads} of {target.size} ({target.n_rot} turned)"
        )
    if data.ndim != 2 or data.dtype != torch.uint8 or data.shape[1] != source.row_nbytes:
        raise FingerprintMismatch(
            f"rows of {tuple(data.shape)[-1]} bytes, where {source.row_nbytes} are expected"
        )
    reordered = source.turns_pairs != target.turns_pairs
    if source.dtype == target.dtype and source.block == target.block:
        if not reordered:
            return Moved(data.contiguous(), 0.0)
        if not source.shares_scales and not source.block:
            # As bytes: a signalling NaN or a denormal goes where it belongs, whatever the processor does to
            # it.
            words = data.reshape(len(data), source.heads, source.size, -1)
            return Moved(_reorder(words, source, target).reshape(len(data), -1), 0.0)
    values = decode(source.dtype, data).view(len(data), source.heads, source.size)
    if source.block != target.block or (reordered and source.block):
        values = rotate(values, source.block)
        values = _reorder(values[..., None], source, target)[..., 0] if reordered else values
        values = rotate(values, target.block)
    elif reordered:
        values = _reorder(values[..., None], source, target)[..., 0]
    flat = values.reshape(len(data), -1)
    written = encode(target.dtype, flat)
    return Moved(written, _loss(flat, decode(target.dtype, written)))


def values_of(data: torch.Tensor, form: Form) -> torch.Tensor:
    """float32 [rows, heads, size], out of any rotation, in our order: what is compared."""
    return (
        move(data, form, Form("f32", form.heads, form.size, form.n_rot))
        .data.view(torch.float32)
        .view(len(data), form.heads, form.size)
    )


def _reorder(words: torch.Tensor, source: Form, target: Form) -> torch.Tensor:
    """[rows, heads, size, ...] from pairs to halves or back; what does not turn stays where it is."""
    if source.turns_pairs == target.turns_pairs:
        return words
    turned, rest = words[:, :, : source.n_rot], words[:, :, source.n_rot :]
    if source.turns_pairs:
        parts = (turned[:, :, 0::2], turned[:, :, 1::2], rest)
        return torch.cat(parts, 2)
    half = source.n_rot // 2
    pairs = torch.stack((turned[:, :, :half], turned[:, :, half:]), 3)
    return torch.cat((pairs.reshape(turned.shape), rest), 2)


def _loss(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """NaN where one of the two is none and the other is."""
    if torch.equal(wanted, got) or (torch.equal(wanted.isnan(), got.isnan()) and _same(wanted, got)):
        return 0.0
    wanted, got = wanted.double(), got.double()
    size = float(wanted.norm())
    apart = float((got - wanted).norm())
    return apart / size if size else math.inf


def _same(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    kept = ~wanted.isnan()
    return torch.equal(wanted[kept], got[kept])

"""The physical rows of one tensor of one layer, and the slots that say where rows are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Ints
from engine.cache.quant import Hadamard, decode, encode
from engine.errors import ConfigError
from engine.state import DTYPES

#: Row dtypes that torch computes with as they are. The others are stored as blocks of bytes.
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROW_TYPES = (*PLAIN, "q8_0", "q5_0", "q4_0")


def check_row_dtype(field: str, dtype: str, head_size: int) -> None:
    """Raises ConfigError, which names the setting `field`, unless heads of this size can be stored so."""
    if dtype not in ROW_TYPES:
        raise ConfigError(f"{field} = {dtype!r}: a cache can be one of {', '.join(ROW_TYPES)}")
    values = DTYPES[dtype][1]
    if head_size % values:
        raise ConfigError(f"{field} = {dtype!r}: it needs head sizes divisible by {values}, not {head_size}")


@dataclass(frozen=True, slots=True)
class Slot:
    """Some cells in a given order: a run [start, stop), or `index` [stop - start] where they are scattered.

    Runs are read without a copy and written with one; scattered cells are gathered. Both give the same
    values in the same strides, so that what is computed from them has the same bits.
    """

    start: int
    stop: int
    index: torch.Tensor | None

    @classmethod
    def of(cls, cells: Ints, device: torch.device) -> Slot:
        if not len(cells):
            return cls(0, 0, None)
        if bool((np.diff(cells) == 1).all()):
            return cls(int(cells[0]), int(cells[-1]) + 1, None)
        return cls(0, len(cells), torch.from_numpy(cells).to(device))

    def __len__(self) -> int:
        return self.stop - self.start

    def pick(self, picked: torch.Tensor) -> Slot:
        """The cells at `picked`, int64 [n] in this order."""
        index = picked + self.start if self.index is None else self.index[picked]
        return Slot(0, len(picked), index)


class RowBuffer:
    """[cells, heads, head size] values of one tensor, stored as `dtype`. A rank of several may have no heads:
    then there is nothing to store.

    Quantized rows are stored in GGUF's block layout. With a `hadamard` rows are rotated before they are
    stored. What `read` returns is still rotated; who reads rotates the other side.
    """

    def __init__(
        self,
        num_cells: int,
        num_heads: int,
        head_size: int,
        dtype: str,
        compute: torch.dtype,
        device: torch.device,
        field: str,
        hadamard: Hadamard | None = None,
    ) -> None:
        """`field` names the setting that chose `dtype`, for the ConfigError that it may be."""
        check_row_dtype(field, dtype, head_size)
        nbytes, values = DTYPES[dtype]
        self.dtype = dtype
        self.num_heads = num_heads
        self.head_size = head_size
        self.row_nbytes = num_heads * head_size // values * nbytes
        self.hadamard = hadamard
        self.compute = compute
        self.device = device
        # Zeros, not garbage: a row that was never written must not look like NaN to anyone.
        if dtype in PLAIN:
            self._data = torch.zeros((num_cells, num_heads, head_size), dtype=PLAIN[dtype], device=device)
        else:
            self._data = torch.zeros((num_cells, self.row_nbytes), dtype=torch.uint8, device=device)
        self._bytes = self._data.flatten(1).view(torch.uint8).numpy() if device.type == "cpu" else None

    # -- values ------------------------------------------------------------------------------------

    def write(self, slot: Slot, values: torch.Tensor) -> None:
        """Store `values` [len(slot), heads, head size], rotated and quantized as this buffer is."""
        if not self.num_heads:
            return
        if self.hadamard is not None:
            values = self.hadamard.rotate(values.float())
        if self.dtype not in PLAIN:
            values = encode(self.dtype, values.float()).view(len(slot), self.row_nbytes)
        self._put(slot, values)

    def read(self, slot: Slot) -> torch.Tensor:
        """[len(slot), heads, head size] in the compute dtype and the stored basis; a view if it can be."""
        data = self._at(slot)
        if self.dtype not in PLAIN:
            data = decode(self.dtype, data, self.compute).view(len(slot), self.num_heads, self.head_size)
        return data.to(self.compute)

    def read_head(self, slot: Slot, head: int) -> torch.Tensor:
        """As `read`, of one head: [len(slot), 1, head size]. The others are not looked at."""
        data = self._at(slot, head)
        if self.dtype not in PLAIN:
            data = decode(self.dtype, data, self.compute)
        return data.to(self.compute)[:, None]

    def read_plain(self, slot: Slot) -> torch.Tensor:
        """The same in float32 and un-rotated."""
        data = self._at(slot)
        if not self.num_heads:
            return data.new_empty((len(slot), 0, self.head_size), dtype=torch.float32)
        if self.dtype not in PLAIN:
            data = decode(self.dtype, data, torch.float32).view(len(slot), self.num_heads, self.head_size)
        wide = data.float()
        return wide if self.hadamard is None else self.hadamard.rotate(wide)

    # -- bytes -------------------------------------------------------------------------------------

    def read_bytes(self, slot: Slot) -> torch.Tensor:
        """A copy of the stored bytes, uint8 [len(slot), row_nbytes]."""
        stored = self._at(slot)
        if slot.index is None:
            stored = stored.clone()
        return stored.flatten(1).view(torch.uint8)

    def write_bytes(self, slot: Slot, stored: torch.Tensor) -> None:
        """Put bytes back that `read_bytes` gave, here or elsewhere."""
        data = self._data
        if not self.num_heads:
            return
        if self._bytes is not None and slot.index is None:
            # A plain copy. torch divides it among threads, which is slow where others are at work.
            self._bytes[slot.start : slot.stop] = stored.numpy()
            return
        if stored.data_ptr() % data.element_size() or stored.storage_offset() % data.element_size():
            stored = stored.clone()
        self._put(slot, stored.contiguous().view(data.dtype).view(len(slot), *data.shape[1:]))

    def _at(self, slot: Slot, head: int | None = None) -> torch.Tensor:
        data = self._data
        if head is not None:
            data = data.view(len(data), self.num_heads, -1)[:, head]
        if slot.index is None:
            return data[slot.start : slot.stop]
        return data.index_select(0, slot.index)

    def _put(self, slot: Slot, stored: torch.Tensor) -> None:
        if slot.index is None:
            self._data[slot.start : slot.stop] = stored
        else:
            self._data.index_copy_(0, slot.index, stored.to(self._data))

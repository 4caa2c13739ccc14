"""The header of a GGUF file, read lazily and with limits: what is declared is checked before it is believed.

Layout (little endian; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

    offset  bytes  what
    0       4      "GGUF"
    4       4      version, 2 or 3
    8       8      number of tensors
    16      8      number of metadata pairs
    24      ...    pairs: key (u64 length, bytes), u32 type, value
    ...     ...    tensors: name, u32 axes, u64 per axis (fastest first), u32 type, u64 offset
    ...     ...    padding to `general.alignment`, then the tensors' data

Strings in arrays (a vocabulary has 262,144) are decoded when they are asked for, not when the file is
opened; making an object of each at opening is what costs other readers seconds.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import WeightsRefused

MAX_PAIRS = 65_536
MAX_TENSORS = 65_536
MAX_ITEMS = 4_194_304  # of one array
MAX_KEY = 65_535  # bytes, as the format says
MAX_NAME = 256  # bytes of a tensor's name
MAX_STRING = 16 * 2**20
MAX_AXES = 4
MAX_ALIGNMENT = 65_536

_BOOL, _STRING, _ARRAY = 7, 8, 9
#: type code -> struct letter, which is also numpy's with "<" before it
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
)

Scalar = int | float | bool | str


class StringArray(Sequence[str]):
    """Strings that stay in the mapped file until one is asked for."""

    def __init__(self, data: mmap.mmap, starts: array[int]) -> None:
        self._data = data
        self._starts = starts  # where each string's length stands

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, index: int) -> bytes:
        start = self._starts[index]
        (nbytes,) = struct.unpack_from("<Q", self._data, start)
        return self._data[start + 8 : start + 8 + nbytes]

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        data, unpack = self._data, struct.Struct("<Q").unpack_from
        for start in self._starts:
            yield data[start + 8 : start + 8 + unpack(data, start)[0]].decode("utf-8", "replace")


Value = Scalar | StringArray | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order, slowest axis first; `start` is a file offset."""

    name: str
    shape: tuple[int, ...]
    quant: GGMLQuantizationType
    start: int
    nbytes: int


class GgufFile:
    """A mapped GGUF file: `values` (metadata), `tensors` (table) and `rows(name)` (bytes).

    Raises WeightsRefused for whatever is not a whole, sound file. Nothing is allocated on the word of
    a declared size: every count has a limit, and every range is held against the file's size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise WeightsRefused(f"{path.name}: {size} bytes are no GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._data)
        #: key -> (first, past last) byte of its type and value, for digests
        self.spans: dict[str, tuple[int, int]] = {}
        try:
            num_tensors, num_pairs = self._counts()
            values, end = self._pairs(num_pairs)
            self.values: Mapping[str, Value] = MappingProxyType(values)
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._table(num_tensors, end))
        except struct.error:
            raise self._refused("the header is cut short") from None

    def raw(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [rows, bytes of a row], mapped and not copied."""
        info = self.tensors[name]
        flat = np.frombuffer(self._data, np.uint8, info.nbytes, info.start)
        num_rows = 1
        for n in info.shape[:-1]:
            num_rows *= n
        return flat.reshape(num_rows, -1)

    def _refused(self, why: str) -> WeightsRefused:
        # Names in it are a stranger's: the message stays one short line whatever they hold.
        line = "".join(c if c.isprintable() else "?" for c in why[:300])
        return WeightsRefused(f"{self.path.name}: {line}")

    def _counts(self) -> tuple[int, int]:
        magic, version, num_tensors, num_pairs = struct.unpack_from("<4sIQQ", self._data, 0)
        if magic != b"GGUF":
            raise self._refused("not a GGUF file")
        if version not in (2, 3):
            big_endian = version & 0xFFFF == 0 and version != 0
            raise self._refused("big-endian GGUF is not read" if big_endian else f"GGUF version {version}")
        if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
            raise self._refused(f"declares {num_tensors} tensors and {num_pairs} metadata pairs")
        return num_tensors, num_pairs

    def _string_end(self, pos: int, limit: int, what: str) -> int:
        (nbytes,) = struct.unpack_from("<Q", self._data, pos)
        if nbytes > limit or pos + 8 + nbytes > self.size:
            raise self._refused(f"{what} of {nbytes} bytes")
        return int(pos + 8 + nbytes)

    def _text(self, pos: int, limit: int, what: str) -> tuple[str, int]:
        end = self._string_end(pos, limit, what)
        try:
            return self._data[pos + 8 : end].decode("utf-8"), end
        except UnicodeDecodeError:
            raise self._refused(f"{what} that is not UTF-8") from None

    def _pairs(self, count: int) -> tuple[dict[str, Value], int]:
        values: dict[str, Value] = {}
        pos = 24
        for _ in range(count):
            key, pos = self._text(pos, MAX_KEY, "a metadata key")
            if key in values:
                raise self._refused(f"{key} is there twice")
            (code,) = struct.unpack_from("<I", self._data, pos)
            start, (values[key], pos) = pos, self._value(key, code, pos + 4)
            self.spans[key] = (start, pos)
        return values, pos

    def _value(self, key: str, code: int, pos: int) -> tuple[Value, int]:
        if code == _STRING:
            end = self._string_end(pos, MAX_STRING, key)
            return self._data[pos + 8 : end].decode("utf-8", "replace"), end
        if code == _ARRAY:
            item, count = struct.unpack_from("<IQ", self._data, pos)
            return self._array(key, item, count, pos + 12)
        if code not in _SCALARS:
            raise self._refused(f"{key} has the unknown type {code}")
        letter = "<" + _SCALARS[code]
        return struct.unpack_from(letter, self._data, pos)[0], pos + struct.calcsize(letter)

    def _array(self, key: str, item: int, count: int, pos: int) -> tuple[Value, int]:
        smallest = 8 if item == _STRING else 1
        if count > MAX_ITEMS or pos + count * smallest > self.size:
            raise self._refused(f"{key} declares {count} items")
        if item == _STRING:
            return self._strings(key, count, pos)
        if item not in _SCALARS:
            raise self._refused(f"{key} is an array of the unknown type {item}")
        dtype = np.dtype("<" + _SCALARS[item] if item != _BOOL else "?")
        end = pos + count * dtype.itemsize
        if end > self.size:
            raise self._refused(f"{key} declares {count} items")
        return np.frombuffer(self._data, dtype, count, pos), end

    def _strings(self, key: str, count: int, pos: int) -> tuple[Value, int]:
        starts = array("Q", bytes(8 * count))
        data, unpack, last = self._data, struct.Struct("<Q").unpack_from, self.size - 8
        for i in range(count):
            starts[i] = pos
            if pos > last:
                raise self._refused(f"{key} is cut short")
            pos += 8 + unpack(data, pos)[0]
        if pos > self.size:
            raise self._refused(f"{key} is cut short")
        return StringArray(data, starts), pos

    def _table(self, count: int, pos: int) -> dict[str, TensorInfo]:
        declared: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for _ in range(count):
            name, pos = self._text(pos, MAX_NAME, "a tensor name")
            if name in declared:
                raise self._refused(f"tensor {name} is there twice")
            (axes,) = struct.unpack_from("<I", self._data, pos)
            if not 1 <= axes <= MAX_AXES:
                raise self._refused(f"tensor {name} has {axes} axes")
            *dims, code, offset = struct.unpack_from(f"<{axes}QIQ", self._data, pos + 4)
            pos += 4 + 8 * axes + 12
            if code not in set(GGMLQuantizationType):
                raise self._refused(f"tensor {name} has the unknown type {code}")
            declared[name] = (tuple(reversed(dims)), GGMLQuantizationType(code), offset)
        return self._placed(declared, pos)

    def _placed(
        self, declared: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]], pos: int
    ) -> dict[str, TensorInfo]:
        """The tensor table with ranges in the file: inside it, aligned, and no two over each other."""
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._refused(f"general.alignment = {alignment}")
        base = -(-pos // alignment) * alignment
        table: dict[str, TensorInfo] = {}
        for name, (shape, quant, offset) in declared.items():
            values, nbytes = GGML_QUANT_SIZES[quant]
            for n in shape:
                if not 1 <= n <= self.size * 32:
                    raise self._refused(f"tensor {name} has an axis of {n}")
                nbytes *= n
            if shape[-1] % values or offset % alignment:
                raise self._refused(f"tensor {name} does not fill its blocks or is not aligned")
            nbytes //= values
            if base + offset + nbytes > self.size:
                raise self._refused(f"tensor {name} ends beyond the file: is the download complete?")
            table[name] = TensorInfo(name, shape, quant, base + offset, nbytes)
        end = 0
        for info in sorted(table.values(), key=lambda t: t.start):
            if info.start < end:
                raise self._refused(f"tensor {info.name} lies over another")
            end = info.start + info.nbytes
        return table

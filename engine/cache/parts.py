"""From what a model declares to where it is kept: the parts of a memory and the tables of their cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.cache.cells import CellTable
from engine.cache.memory import Basis, BlocksSpec, MemorySpec, PartNeed, PointSpec, RowsSpec
from engine.cache.points import PointBuffer
from engine.cache.quant import LEAST_ROTATED, Hadamard, hadamard_block
from engine.cache.rows import PLAIN, RowBuffer, check_row_dtype
from engine.errors import ConfigError
from engine.state import Layout, PartKind, PartSpec

#: the rank of a part in the layout goes by kind first
_RANKS = {kind: rank for rank, kind in enumerate(PartKind)}

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Token or window rows: cell i of `table` has its row at i of `buffer`."""

    spec: PartSpec
    need: RowsSpec
    buffer: RowBuffer
    table: CellTable


@dataclass(frozen=True, slots=True)
class BlocksPart:
    """Block rows. Positions in `table` are numbers of blocks."""

    spec: PartSpec
    need: BlocksSpec
    buffer: RowBuffer
    table: CellTable


@dataclass(frozen=True, slots=True)
class PointPart:
    spec: PartSpec
    need: PointSpec
    buffer: PointBuffer


Part = RowsPart | BlocksPart | PointPart


class Tables:
    """The cell tables of one memory: `base` knows every position, `windowed`, if there is one, the last of
    them, and `blocks` the closed blocks of each size. Parts of one kind share theirs by reference."""

    def __init__(self, spec: MemorySpec, base: CellTable, windowed: CellTable | None) -> None:
        self.base = base
        self.windowed = windowed
        sizes = {need.block for need in spec.needs.parts if isinstance(need, BlocksSpec)}
        # Forks can each close a block of their own over the same tokens.
        self.blocks = {
            size: CellTable(-(-base.num_cells // size) + spec.num_seqs, spec.num_seqs)
            for size in sorted(sizes)
        }

    @property
    def of_tokens(self) -> tuple[CellTable, ...]:
        """Those whose positions are tokens'."""
        return (self.base,) if self.windowed is None else (self.base, self.windowed)

    def of_rows(self, need: RowsSpec) -> CellTable:
        return self.base if need.window is None or self.windowed is None else self.windowed

    def __iter__(self) -> Iterator[tuple[CellTable, int]]:
        """Every table, and how many tokens one of its positions stands for."""
        yield from ((table, 1) for table in self.of_tokens)
        yield from ((table, size) for size, table in self.blocks.items())


class Parts:
    """The parts of a memory in the order of its layout, and by name and layer."""

    def __init__(self, spec: MemorySpec, tables: Tables) -> None:
        built = (_build(need, spec, tables) for need in spec.needs.parts)
        self.all: tuple[Part, ...] = tuple(sorted(built, key=_rank))
        self.rows: dict[Key, RowsPart] = {}
        self.blocks: dict[Key, BlocksPart] = {}
        self.points: dict[Key, PointPart] = {}
        for part in self.all:
            key = part.need.name, part.need.layer
            match part:
                case RowsPart():
                    self.rows[key] = part
                case BlocksPart():
                    self.blocks[key] = part
                case PointPart():
                    self.points[key] = part

    @property
    def layout(self) -> Layout:
        return tuple(part.spec for part in self.all)

    @property
    def stored(self) -> Sequence[RowsPart | BlocksPart]:
        """Those that have rows, in the order of the layout."""
        return [part for part in self.all if not isinstance(part, PointPart)]

    @property
    def rotated(self) -> tuple[str, ...]:
        """Names of the parts whose rows are Hadamard-rotated."""
        return tuple(sorted({part.need.name for part in self.stored if part.buffer.hadamard is not None}))


def _rank(part: Part) -> tuple[int, int, str]:
    return _spec_rank(part.spec)


def _spec_rank(spec: PartSpec) -> tuple[int, int, str]:
    return _RANKS[spec.kind], spec.layer, spec.name


def part_name(need: PartNeed) -> str:
    """What the part is called in the layout."""
    return f"{need.name}.{need.layer:02}"


def _build(need: PartNeed, spec: MemorySpec, tables: Tables) -> Part:
    part = part_spec(need, spec.type_k, spec.type_v)
    match need:
        case RowsSpec():
            table = tables.of_rows(need)
            return RowsPart(part, need, _buffer(need, need.heads, part.dtype, table, spec), table)
        case BlocksSpec():
            table = tables.blocks[need.block]
            return BlocksPart(part, need, _buffer(need, 1, part.dtype, table, spec), table)
        case PointSpec():
            return PointPart(part, need, PointBuffer(need, spec.num_seqs, spec.device))


def part_spec(need: PartNeed, type_k: str, type_v: str) -> PartSpec:
    """What the layout says of the part where rows are of these dtypes. Raises ConfigError, which names the
    setting, for one that its rows cannot be stored as."""
    name = part_name(need)
    match need:
        case RowsSpec():
            kind = PartKind.TOKEN if need.window is None else PartKind.WINDOW
            window = None if need.window is None else need.window.size
            dtype, shape = _dtype(need, type_k, type_v), (need.heads, need.size)
            return PartSpec(name, kind, need.layer, dtype, shape, window=window)
        case BlocksSpec():
            dtype = _dtype(need, type_k, type_v)
            return PartSpec(name, PartKind.BLOCK, need.layer, dtype, (need.size,), block=need.block)
        case PointSpec():
            return PartSpec(name, PartKind.POINT, need.layer, "f32", need.shape)


def layout_of(needs: Iterable[PartNeed], type_k: str, type_v: str) -> Layout:
    """The layout of a memory of these parts. Raises ConfigError as `part_spec`."""
    return tuple(sorted((part_spec(need, type_k, type_v) for need in needs), key=_spec_rank))


def _dtype(need: RowsSpec | BlocksSpec, type_k: str, type_v: str) -> str:
    dtype = type_k if need.field == "type_k" else type_v
    check_row_dtype(need.field, dtype, need.size)
    return dtype


def _buffer(
    need: RowsSpec | BlocksSpec, heads: int, dtype: str, table: CellTable, spec: MemorySpec
) -> RowBuffer:
    return RowBuffer(
        table.num_cells,
        heads,
        need.size,
        dtype,
        spec.dtype,
        spec.device,
        need.field,
        _hadamard(need, dtype, spec),
    )


def rotated_block(need: RowsSpec | BlocksSpec, dtype: str) -> int:
    """How many values of a row are Hadamard-rotated together where it is stored as `dtype`; 0: none are.
    Raises ConfigError where it must be and cannot."""
    block = hadamard_block(need.rotated_sizes if isinstance(need, RowsSpec) else (need.size,))
    match need.basis:
        case Basis.PLAIN:
            return 0
        case Basis.QUANTIZED:
            return block if dtype not in PLAIN and block >= LEAST_ROTATED else 0
        case Basis.ROTATED:
            if block < 2:
                raise ConfigError(f"{need.name}: rows of {need.size} values cannot be rotated")
            return block


def _hadamard(need: RowsSpec | BlocksSpec, dtype: str, spec: MemorySpec) -> Hadamard | None:
    block = rotated_block(need, dtype)
    return Hadamard(block, spec.device) if block else None

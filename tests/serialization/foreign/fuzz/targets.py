"""What is fuzzed: for every reader, good files and the geometries that they are read by."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import UsageError
from serialization.foreign.detect import sequences
from serialization.foreign.foreign_state import ForeignState
from serialization.foreign.geometry import Geometry
from serialization.foreign.readers import READERS, Asked, Kind, read_bytes
from serialization.foreign.refused import refused_file
from serialization.foreign.tensor_file import begins_tensor_file
from serialization.foreign.torch_dump import write_torch_dump
from tests.serialization.foreign import mlx_files, test_torch_dump
from tests.serialization.foreign.geometries import GEOMETRIES
from tests.serialization.foreign.test_torch_dump import values, written

_GOLDEN = Path(__file__).parents[3] / "golden"


@dataclass(frozen=True, slots=True)
class Seed:
    """A good file, and the geometry of its model."""

    name: str
    data: bytes
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Target:
    """`read` may raise a StateError and nothing else."""

    name: str
    seeds: tuple[Seed, ...]
    read: Callable[[bytearray, Geometry], object]


def _checked(state: ForeignState) -> ForeignState:
    """What every reader promises of what it returns."""
    for cells in state.caches:
        assert cells.positions.dtype == np.int64
        for rows in cells.rows:
            assert rows.data.ndim == 2
            assert rows.data.is_contiguous()
            assert len(rows.data) == len(cells.positions)
    assert state.length >= 0
    return state


def _reading(kind: Kind, ids: tuple[int, ...] | None = None) -> Callable[[bytearray, Geometry], ForeignState]:
    def read(data: bytearray, geometry: Geometry) -> ForeignState:
        return _checked(read_bytes(data, Asked(geometry, None, ids), kind))

    return read


def _llama(data: bytearray, geometry: Geometry) -> object:
    """One sequence, and then each of several."""
    with suppress(UsageError):
        for sequence in sequences(data, geometry)[:4]:
            _checked(read_bytes(data, Asked(geometry, sequence), Kind.LLAMA_CPP))
    return _checked(read_bytes(data, Asked(geometry), Kind.LLAMA_CPP))


def _any(data: bytearray, geometry: Geometry) -> object:
    """Which kind a file is by its first bytes, and then what it holds."""
    first = bytes(data)
    if not begins_tensor_file(first) and refused_file(first) is not None:
        return None
    for reader in READERS:
        if reader.fits(first):
            return _checked(reader.read(data, Asked(geometry, None, None)))
    return None


def _llama_seeds() -> Iterator[Seed]:
    for path in sorted((_GOLDEN / "foreign").glob("*.bin")):
        yield Seed(path.stem, path.read_bytes(), GEOMETRIES[path.name.split(".")[0]])


_MLX: Mapping[str, Geometry] = {
    "plain": mlx_files.PLAIN,
    "windows": mlx_files.WINDOWS,
    "quantized": mlx_files.QUANTIZED,
    "hybrid": mlx_files.HYBRID,
    "chunks": mlx_files.CHUNKED,
}


def _mlx_seeds() -> Iterator[Seed]:
    for path in sorted((_GOLDEN / "mlx-lm").glob("*.safetensors")):
        name = path.name.split("-")[0]
        if name in _MLX:
            yield Seed(path.stem, path.read_bytes(), _MLX[name])
    pairs = mlx_files.written({"0_keys": mlx_files.kv(), "0_values": mlx_files.kv()}, mlx_files.pairs())
    yield Seed("pairs", bytes(pairs), mlx_files.ONE)


def _dump_seeds() -> Iterator[Seed]:
    geometry = test_torch_dump.ONE
    for dtype in ("float16", "float32", "uint16"):
        ids = np.arange(6, dtype="int64")
        data = written(_0_keys=values(dtype=dtype), _0_values=values(dtype=dtype), tokens=ids)
        yield Seed(f"full {dtype}", bytes(data), geometry)
    said = {**test_torch_dump.SAID, "kinds": "sliding", "model_type": "cohere2"}
    data = written(said, _0_keys=values(3), _0_values=values(3))
    yield Seed("sliding", bytes(data), test_torch_dump.SLIDING)
    both = {"_0_keys": values(), "_0_values": values(), "_0_state": np.ones((1, 2, 4), "float32")}
    data = written({**said, "kinds": "linear+full"}, _0_conv_0=np.ones((1, 2, 4), "float16"), **both)
    yield Seed("linear+full", bytes(data), test_torch_dump.BOTH)
    state = _checked(read_bytes(bytearray(data), Asked(test_torch_dump.BOTH), Kind.TRANSFORMERS))
    assert state.point is not None
    one = read_bytes(bytearray(test_torch_dump.plain()), Asked(geometry), Kind.TRANSFORMERS)
    yield Seed("ours", b"".join(write_torch_dump(one, geometry)), geometry)


def _other_seeds() -> Iterator[Seed]:
    geometry = GEOMETRIES["plain"]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield Seed(f"pickle {protocol}", pickle.dumps({"a": [1, b"x" * 50]}, protocol), geometry)
    yield Seed("sqlite", b"SQLite format 3\0" + bytes(200), geometry)
    yield Seed("zip", b"PK\x03\x04" + bytes(22) + b"\x10\0\0\0archive/data.pkl" + bytes(60), geometry)
    yield Seed("model", b"GGUF" + bytes(100), geometry)


def _targets() -> Iterator[Target]:
    llama, mlx, dumps = tuple(_llama_seeds()), tuple(_mlx_seeds()), tuple(_dump_seeds())
    yield Target("llama.cpp", llama, _llama)
    yield Target("mlx-lm", mlx, _reading(Kind.MLX))
    yield Target("transformers", dumps, _reading(Kind.TRANSFORMERS))
    yield Target("any", (*llama[::7], *mlx[::3], *dumps, *_other_seeds()), _any)


TARGETS: Mapping[str, Target] = {target.name: target for target in _targets()}

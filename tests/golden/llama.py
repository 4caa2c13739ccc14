"""States as llama.cpp writes them, made from the byte tables alone: nothing of what is tested is used here.

Run once for each new layout: python -m tests.golden.llama. Files that exist are never written again.
Row bytes are a pattern of (layer, tensor, cell), so that an expected parse can be computed anywhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

FOLDER = Path(__file__).parent / "foreign"

TYPES = {"f32": (0, 4, 1), "f16": (1, 2, 1), "q4_0": (2, 18, 32), "q5_0": (6, 22, 32), "q8_0": (8, 34, 32)}
TYPES |= {"bf16": (30, 2, 1), "q4_1": (3, 20, 32)}


#: position, owners, words of extension
Cell = tuple[int, tuple[int, ...], tuple[int, ...]]


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def i32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def row(layer: int, tensor: str, cell: int, nbytes: int) -> bytes:
    seed = layer * 31 + ord(tensor) * 7 + cell * 13
    return bytes((seed + 3 * i) % 251 for i in range(nbytes))


def row_nbytes(dtype: str, values: int) -> int:
    _, nbytes, block = TYPES[dtype]
    return values // block * nbytes


@dataclass(frozen=True)
class Kv:
    """One KV cache as a file has it. `cells`: of each stream, (position, owners, extension words)."""

    layers: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    streams: bool = True
    keys: tuple[str, int] = ("f16", 32)
    values: tuple[str, int] | None = ("f16", 32)
    transposed: bool = False

    def data(self) -> bytes:
        out = u32(len(self.cells)) if self.streams else b""
        for cells in self.cells:
            out += u32(len(cells))
            for position, owners, extension in cells:
                out += i32(position) + u32(len(owners)) + i32(*extension) + i32(*owners)
            if not cells:
                continue
            out += u32(int(self.transposed), len(self.layers))
            for layer in self.layers:
                out += self.tensor(layer, "k", *self.keys, len(cells))
            for layer in self.layers:
                if self.values and self.transposed:
                    dtype, count = self.values
                    size = TYPES[dtype][1]
                    out += i32(TYPES[dtype][0]) + u32(size, count)
                    rows = [row(layer, "v", cell, size * count) for cell in range(len(cells))]
                    for value in range(count):
                        out += b"".join(each[value * size : (value + 1) * size] for each in rows)
                elif self.values:
                    out += self.tensor(layer, "v", *self.values, len(cells))
        return out

    def tensor(self, layer: int, tensor: str, dtype: str, values: int, num_cells: int) -> bytes:
        nbytes = row_nbytes(dtype, values)
        rows = [row(layer, tensor, cell, nbytes) for cell in range(num_cells)]
        return i32(TYPES[dtype][0]) + u64(nbytes) + b"".join(rows)


@dataclass(frozen=True)
class Recurrent:
    """Recurrent memory as a file has it. `cells`: (position, owners)."""

    num_layers: int
    layers: tuple[int, ...]
    cells: tuple[tuple[int, tuple[int, ...]], ...]
    conv: int = 6
    state: int = 8

    def data(self) -> bytes:
        out = u32(len(self.cells))
        for position, owners in self.cells:
            out += i32(position) + u32(len(owners)) + i32(*owners)
        out += u32(0, self.num_layers)
        for tensor, values in (("r", self.conv), ("s", self.state)):
            for layer in self.layers:
                out += i32(0) + u64(4 * values)
                out += b"".join(row(layer, tensor, cell, 4 * values) for cell in range(len(self.cells)))
        return out


def tokens(words: Sequence[int]) -> bytes:
    return u32(len(words)) + i32(*words)


def sequence_file(version: int, words: Sequence[int], *parts: Kv | Recurrent) -> bytes:
    return u32(0x67677371, version) + tokens(words) + b"".join(each.data() for each in parts)


def session_file(version: int, words: Sequence[int], body: bytes, *parts: Kv | Recurrent) -> bytes:
    return u32(0x6767736E, version) + tokens(words) + body + b"".join(each.data() for each in parts)


def name_of(model: str) -> bytes:
    return u32(len(model)) + model.encode()


def outputs(places: Sequence[int], logits: int, embeddings: int) -> bytes:
    floats = [struct.pack(f"<{count}f", *map(float, range(count))) for count in (logits, embeddings)]
    return tokens(places) + u64(logits) + floats[0] + u64(embeddings) + floats[1]


def packed(ids: Sequence[int], media: Sequence[tuple[int, bytes]] = ()) -> list[int]:
    record = i32(-1) + u32(1, len(ids)) + i32(*ids) + u32(len(media), *(start for start, _ in media))
    for _, content in media:
        record += u32(len(content)) + content
    record += bytes(-len(record) % 4)
    return list(struct.unpack(f"<{len(record) // 4}i", record))


def owned(positions: Sequence[int], *owners: int, words: int = 0) -> tuple[Cell, ...]:
    """Cells that all have the same owners; extension words are told from anything else by their size."""
    return tuple((each, owners, tuple(1000 + 10 * each + w for w in range(words))) for each in positions)


@dataclass(frozen=True)
class Made:
    """A file, and what it was made of: all that a reader can know."""

    data: bytes
    ids: tuple[int, ...] | None
    parts: tuple[Kv | Recurrent, ...]


IDS = (11, 12, 13)
AT = (0, 1, 2)
CELLS = owned(AT, 0)
BARE = owned(AT)  # layout 2a: no owners
PLAIN = Kv((0, 1), (CELLS,))
OLD = Kv((0, 1), (BARE,), streams=False)
FULL, SLIDING = Kv((1,), (CELLS,)), Kv((0, 2), (owned((1, 2), 0),))
POINT = Recurrent(3, (0, 2), ((2, ()),))
SEVERAL = Recurrent(3, (0, 2), ((2, (0,)), (5, (3, 1))))


def sequence_goldens() -> dict[str, Made]:
    """geometry.layout-what it shows -> the file."""
    made: dict[str, Made] = {}

    def add(name: str, version: int, *parts: Kv | Recurrent, words: Sequence[int] = IDS) -> None:
        ids = None if "picture" in name and words[0] < 0 else IDS if words[0] < 0 else tuple(words)
        made[name] = Made(sequence_file(version, words, *parts), ids, parts)

    add("plain.2a", 2, OLD)
    add("plain.2a-transposed", 2, replace(OLD, transposed=True))
    add("plain.2a-one-token", 2, replace(OLD, cells=(owned((0,)),)), words=(11,))
    add("iswa.2a-one-cache", 2, Kv((0, 1, 2), (BARE,), streams=False))
    add("recurrent.2a", 2, POINT)
    add("plain.2b", 2, replace(OLD, cells=(CELLS,)))
    add("iswa.2b", 2, replace(FULL, streams=False), replace(SLIDING, streams=False))
    add("iswa.2b-one-cache", 2, Kv((0, 1, 2), (CELLS,), streams=False))
    add("plain.2c", 2, PLAIN)
    add("plain.2c-one-token", 2, replace(PLAIN, cells=(owned((0,), 0),)), words=(11,))
    add("plain.2c-transposed", 2, replace(PLAIN, transposed=True))
    add("plain.2c-second-of-two-streams", 2, replace(PLAIN, cells=((), owned(AT, 1))))
    add("iswa.2c", 2, FULL, SLIDING)
    add("pictures.2c", 2, Kv((0,), (CELLS,)))
    add("pictures.2d", 2, Kv((0,), (owned(AT, 0, words=2),)))
    add("plain.3", 3, PLAIN)
    add("plain.3-transposed", 3, replace(PLAIN, transposed=True))
    add("plain.3-any-order", 3, replace(PLAIN, cells=(owned((2, 0, 1), 0),)))
    add("plain.3-one-id-more", 3, PLAIN, words=(*IDS, 14))
    add("plain.3-fourth-of-four-streams", 3, replace(PLAIN, cells=((), (), (), owned(AT, 3))))
    add("plain.3-quantized-keys-transposed", 3, replace(PLAIN, keys=("q8_0", 32), transposed=True))
    for dtype in ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0"):
        add(f"plain.3-{dtype}", 3, replace(PLAIN, keys=(dtype, 32), values=(dtype, 32)))
    add("iswa.3", 3, FULL, SLIDING)
    add("latents.3", 3, Kv((0, 1), (CELLS,), keys=("f16", 64), values=None))
    index = Kv((0, 1), (CELLS,), values=None)
    add("indexed.3", 3, Kv((0, 1), (CELLS,), keys=("f16", 64), values=None), index)
    latents = Kv((1,), (CELLS,), keys=("f16", 64), values=None)
    add("indexed-iswa.3", 3, latents, replace(index, layers=(1,)), SLIDING)
    add("recurrent.3", 3, POINT)
    add("hybrid.3", 3, FULL, POINT)
    add("hybrid-iswa.3", 3, FULL, replace(SLIDING, layers=(3, 4)), replace(POINT, num_layers=5))
    add("hybrid-indexed.3", 3, FULL, POINT, replace(index, layers=(1,)))
    add("pictures.3", 3, Kv((0,), (owned(AT, 0, words=3),)))
    add("pictures.3-one-place-in-time", 3, Kv((0,), (tuple((5, (0,), (x, 2, -1)) for x in AT),)))
    add("tokens.2d", 2, Kv((0,), (CELLS,)))
    add("tokens.3", 3, Kv((0,), (owned(AT, 0, words=3),)))
    add("plain.3-slot", 3, PLAIN, words=packed(IDS))
    media = packed((11, -1, -1, 13), [(1, b"seven b")])
    add("pictures.3-slot-with-a-picture", 3, Kv((0,), (owned((0, 1, 2, 3), 0, words=3),)), words=media)
    return made


def other_goldens() -> dict[str, Made]:
    """The same for files of a context, and for states from memory."""
    made: dict[str, Made] = {}

    def session(name: str, version: int, model: str, *parts: Kv | Recurrent, before: bytes = b"") -> None:
        made[name] = Made(session_file(version, IDS, name_of(model) + before, *parts), IDS, parts)

    def state(name: str, before: bytes, *parts: Kv | Recurrent) -> None:
        made[name] = Made(before + b"".join(each.data() for each in parts), None, parts)

    last, none = outputs((2,), 100, 0), outputs((), 0, 0)
    shared = ((0, (0, 3), ()), (1, (0,), ()), (1, (3,), ()), (2, (3,), ()))
    placed = tuple((at, owners, (at, 7, -1)) for at, owners, _ in shared)
    session("plain.9a", 9, "llama", replace(OLD, cells=(CELLS,)), before=last)
    session("plain.9a-two-sequences", 9, "llama", replace(OLD, cells=(shared,)), before=none)
    session("iswa.9a-one-cache", 9, "gemma3", Kv((0, 1, 2), (CELLS,), streams=False), before=last)
    session("plain.9b", 9, "llama", PLAIN, before=last)
    session("plain.9b-embeddings", 9, "llama", PLAIN, before=outputs((1, 2), 0, 24))
    session("iswa.9b", 9, "gemma3", FULL, SLIDING, before=last)
    session("plain.9c", 9, "llama", PLAIN)
    session("pictures.9d", 9, "qwen2vl", Kv((0,), (owned(AT, 0, words=2),)))
    session("plain.10", 10, "llama", PLAIN)
    session("plain.10-transposed", 10, "llama", replace(PLAIN, transposed=True))
    session("plain.10-two-sequences", 10, "llama", replace(PLAIN, cells=(shared,)))
    session("plain.10-two-streams", 10, "llama", replace(PLAIN, cells=(owned((1, 0), 0), (), owned(AT, 2))))
    session("pictures.10-two-sequences", 10, "qwen2vl", Kv((0,), (placed,)))
    session("tokens.10", 10, "ple", Kv((0,), (owned(AT, 0, words=3),)))
    session("recurrent.10-three-sequences", 10, "mamba", SEVERAL)
    session("hybrid.10", 10, "jamba", FULL, replace(POINT, cells=((2, (0,)),)))
    prefix = u32(0xAF143CD8)
    state("plain.prefixed-second-of-two-streams", prefix + i32(1), replace(PLAIN, cells=((), owned(AT, 1))))
    state("recurrent.prefixed", prefix + i32(7), POINT)
    state("pictures.prefixed-2d", prefix + i32(0), Kv((0,), (owned(AT, 0, words=2),)))
    state("pictures.prefixed-3", prefix + i32(0), Kv((0,), (owned(AT, 0, words=3),)))
    state("plain.bare-2a", b"", OLD)
    state("plain.bare-2b", b"", replace(OLD, cells=(CELLS,)))
    state("plain.bare-2c", b"", PLAIN)
    state("plain.context-9b", name_of("llama") + last, PLAIN)
    state("plain.context-10", name_of("llama"), PLAIN)
    return made


def goldens() -> dict[str, Made]:
    return sequence_goldens() | other_goldens()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    digests = {}
    for name, made in goldens().items():
        path = FOLDER / f"{name}.bin"
        if not path.exists():
            path.write_bytes(made.data)
        digests[path.name] = blake3(path.read_bytes()).hexdigest()
    (FOLDER / "index.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()

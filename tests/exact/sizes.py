"""docs/sizes.md: how large the state of each member is, and what llama.cpp stores of the same.

`python -m tests.exact.sizes` writes the page. Sizes follow from the layouts of the tiny models of the
tests, with rows of two bytes a value; a test holds the formula to a real snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.state import Layout, PartKind, PartSpec
from tests.exact.members import MEMBERS, Member, open_member

PAGE = Path(__file__).parent.parent.parent / "docs" / "sizes.md"
LENGTH = 4096

HEAD = """# How large a state is

Bytes of one sequence's state after 4,096 tokens, uncompressed, with rows in bf16 (llama.cpp: f16), for one
architecture of every kind of memory. The models are the tiny ones of the tests, so that the figures are to
be compared with each other and with the last column; a real model's follow by its sizes. That last column
is worked out from the layout of llama.cpp's sequence states (tree of 1 October 2026) for the same model:
its rows, its recurrent states, and for every cell of every cache a position and a number of owners (8
bytes, and 12 more where cells are extended). Token ids, 4 bytes a token, are beside the state in both.
"Points" is point state. Made by `make docs`; a test holds the formula to real snapshots.

| architecture | kind | a token | in all | of that, rows | blocks | window | points | llama.cpp |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""

#: bytes of a cell's metadata in a state of llama.cpp: position and number of owners
CELL = 8
#: what an extended cell adds: a 2-D position and a token id
EXTENSION = 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes by kind of part."""

    token: int
    block: int
    window: int
    point: int

    @property
    def total(self) -> int:
        return self.token + self.block + self.window + self.point


def part_nbytes(spec: PartSpec, length: int) -> int:
    """What must be stored of a part to go on at `length`."""
    match spec.kind:
        case PartKind.TOKEN | PartKind.BLOCK:
            return spec.num_rows(0, length) * spec.row_nbytes
        case PartKind.WINDOW:
            return min(spec.window or 0, length) * spec.row_nbytes
        case PartKind.POINT:
            return spec.row_nbytes


def ours(layout: Layout, length: int) -> Sizes:
    sums = dict.fromkeys(PartKind, 0)
    for spec in layout:
        sums[spec.kind] += part_nbytes(spec, length)
    return Sizes(*(sums[kind] for kind in (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW, PartKind.POINT)))


def theirs(member: Member, layout: Layout, length: int) -> int:
    """The same of llama.cpp (tree of 1 October 2026): rows and cells of every cache, states as they are."""
    sizes = ours(layout, length)
    window = max((spec.window or 0 for spec in layout if spec.kind is PartKind.WINDOW), default=0)
    cells = {
        "kv": length,
        "iswa": length + min(window, length),
        "dsa": 2 * length,
        "dsa_iswa": 2 * length + min(window, length),
        "dsv4": length + min(window, length),
        "msa": 2 * length,
        "recurrent": 1,
        "hybrid": length + 1,
        "hybrid_iswa": length + min(window, length) + 1,
        "hybrid_idx": 2 * length + 1,
    }[member.kind]
    extra = 0
    if member.kind == "msa":  # the indexer's cache has values, which are never written
        extra = sum(part_nbytes(spec, length) for spec in layout if spec.name.startswith("idx."))
    if member.kind == "hybrid_idx":
        extra = _unpooled(member, layout, length) - sizes.block
        extra -= sum(spec.row_nbytes for spec in layout if spec.name.startswith("idx.open"))
        extra += EXTENSION * 2 * length if member.family == "qwen4_exp" else 0
    return sizes.total + cells * CELL + extra


def _unpooled(member: Member, layout: Layout, length: int) -> int:
    """Indexer rows that are kept for every token: its raw key, or its key, gate and pooled key."""
    vectors = 3 if member.family == "glm5_next" else 1
    keys = sum(spec.row_nbytes for spec in layout if spec.name.startswith("pool."))
    return vectors * keys * length


def render() -> str:
    return HEAD + "".join(_line(member) for member in MEMBERS.values())


def _line(member: Member) -> str:
    layout = open_member(member.family, "bf16").layout
    sizes = ours(layout, LENGTH)
    grown = ours(layout, 2 * LENGTH).total - sizes.total
    columns = (
        sizes.total,
        sizes.token,
        sizes.block,
        sizes.window,
        sizes.point,
        theirs(member, layout, LENGTH),
    )
    figures = " | ".join(f"{figure:,}" for figure in columns)
    return f"| {member.family} | `{member.kind}` | {grown / LENGTH:,.1f} | {figures} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")

"""States of other systems made of what a tiny engine computed."""

from __future__ import annotations

import dataclasses

from engine.runner import Engine
from engine.state import SeqId
from serialization.foreign.containers import write_sequence_file
from serialization.foreign.detect import read_llama
from serialization.foreign.foreign_state import ForeignState, Rotation
from serialization.foreign.outward import Wanted, to_foreign
from sessions.migrate.geometry import geometry_of, target_of


def ids(count: int, seed: int = 3) -> tuple[int, ...]:
    """Ids of bytes, as every tiny model has them."""
    return tuple((seed + 7 * n * n + 13 * n) % 250 for n in range(count))


def fed(engine: Engine, tokens: tuple[int, ...]) -> SeqId:
    seq = engine.create()
    engine.feed(seq, tokens)
    return seq


def foreign_of(
    engine: Engine,
    tokens: tuple[int, ...],
    type_k: str = "f32",
    type_v: str = "f32",
    rotation: Rotation = Rotation.ROTATED,
) -> ForeignState:
    """What llama.cpp would have of `tokens`, if it computed as `engine` does, by way of a file."""
    seq = fed(engine, tokens)
    state, _ = to_foreign(
        "a test",
        target_of(engine),
        geometry_of(engine),
        engine.snapshot(seq).rows,
        tokens,
        Wanted(type_k, type_v, rotation=rotation),
    )
    engine.rewind(seq, 0)
    engine.close(seq)
    data = b"".join(write_sequence_file(state, geometry_of(engine)))
    return read_llama(data, geometry_of(engine))


def changed(state: ForeignState, **changes: object) -> ForeignState:
    return dataclasses.replace(state, **changes)  # type: ignore[arg-type]

"""What a resume saves, what a save costs, and how small and fast the codecs are."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import seconds, tell
from engine.runner import Engine
from engine.state import SeqId
from serialization.manifest import Manifest
from serialization.pipelines import CODEC_SETS
from serialization.snapshot import read_state, write_state
from sessions.manager import SessionManager
from sessions.session import Session
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore


def run(model: str, engine: Engine, text: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        manager = SessionManager(DiskStore(Path(folder) / "store", "default"), engine)
        for length in (512, 2000, 8000):
            _resume_against_reading(model, manager, text, length)
        _turn_against_full(model, manager, text)
        _codecs(model, manager, text)


def _resume_against_reading(model: str, manager: SessionManager, text: Sequence[int], length: int) -> None:
    """Open to first new token, against reading the same tokens in the same engine."""
    engine = manager.engine
    reading = []
    for run in range(2):
        # A first token of its own, so that no prefix in memory can be shared.
        tokens = [1000 + length + run, *text[1:length]]
        seq = engine.create()
        started = time.perf_counter()
        shared = engine.feed(seq, tokens).shared
        engine.decode([seq])
        reading.append(time.perf_counter() - started)
        assert shared == 0
        session = _saved(manager, seq) if run else None
        _forget(engine, seq)
    assert session is not None

    resuming = []
    for _ in range(6):
        started = time.perf_counter()
        opened = manager.open(session)
        seq, result = manager.resume(opened)
        engine.decode([seq])
        resuming.append(time.perf_counter() - started)
        opened.close()
        _forget(engine, seq)
        assert result.recomputed == 0
    resumed = sorted(resuming[1:])[2]
    tell(
        "resume against reading",
        model=model,
        tokens=length,
        reading_s=min(reading),
        resume_s=resumed,
        ratio=min(reading) / resumed,
    )


def _turn_against_full(model: str, manager: SessionManager, text: Sequence[int]) -> None:
    """Saving a 50-token turn, against saving all 4,000 tokens."""
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, text[3:4003])
    engine.decode([seq])
    session = manager.create()
    started = time.perf_counter()
    full = manager.save(session, seq, ())
    full_s = time.perf_counter() - started
    turns, nbytes = [], []
    for turn in range(7):
        engine.feed(seq, text[5000 + 50 * turn : 5049 + 50 * turn])
        engine.decode([seq])
        started = time.perf_counter()
        nbytes.append(manager.save(session, seq, ()).bytes_written)
        turns.append(time.perf_counter() - started)
    session.close()
    engine.close(seq)
    turn_s, turn_bytes = sorted(turns)[3], sorted(nbytes)[3]
    tell(
        "a 50-token turn against a full save at 4,000",
        model=model,
        full_s=full_s,
        turn_s=turn_s,
        time_ratio=turn_s / full_s,
        full_bytes=full.bytes_written,
        turn_bytes=turn_bytes,
        bytes_ratio=turn_bytes / full.bytes_written,
    )


def _codecs(model: str, manager: SessionManager, text: Sequence[int]) -> None:
    """Bytes per token, and uncompressed bytes per second of writing and reading on one core."""
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, text[5:4101])
    state = engine.snapshot(seq)
    engine.decode([seq])
    session = _saved(manager, seq)
    manifest = manager.manifest(session)
    engine.close(seq)
    raw = sum(rows.nbytes for rows in state.rows)
    for name, codecs in CODEC_SETS.items():
        store = MemoryStore()
        with one_core():
            write_s = seconds(lambda store=store, codecs=codecs: write_state(store, state, None, 0, codecs))  # type: ignore[misc]
            written = write_state(store, state, None, 0, codecs)
            stored = _with(manifest, written.chunks)
            read_s = seconds(lambda store=store, stored=stored: read_state(store, stored, workers=1))  # type: ignore[misc]
            load_s = seconds(lambda store=store, stored=stored: _load(engine, store, stored))  # type: ignore[misc]
        loaded = sum(rows.nbytes for rows in read_state(store, stored, workers=1).rows)
        size = sum(blob.ref.nbytes for chunk in written.chunks for blob in chunk.blobs)
        tell(
            "codec",
            model=model,
            codec=name,
            tokens=state.length,
            bytes_per_token=size / state.length,
            ratio=raw / size,
            encode_GB_s=raw / write_s / 1e9,
            decode_GB_s=loaded / read_s / 1e9,
            load_GB_s=loaded / load_s / 1e9,
        )


def _with(manifest: Manifest, chunks: object) -> Manifest:
    from dataclasses import replace

    return replace(manifest, chunks=chunks)  # type: ignore[arg-type]


def _load(engine: Engine, store: MemoryStore, manifest: Manifest) -> None:
    """Digests, decoding and the copy into the cache."""
    seq = engine.restore(read_state(store, manifest, workers=1))
    _forget(engine, seq)


def _forget(engine: Engine, seq: SeqId) -> None:
    """Close it and leave no idle rows behind, as in a process that has just begun."""
    engine.rewind(seq, 0)
    engine.close(seq)


def _saved(manager: SessionManager, seq: SeqId) -> str:
    session: Session = manager.create()
    manager.save(session, seq, ())
    session.close()
    return session.id


@contextmanager
def one_core() -> Iterator[None]:
    """Only one core for this process, where the system can do that."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

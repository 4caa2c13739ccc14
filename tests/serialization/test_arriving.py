"""Laws of rows that are read as they are put in place: the same rows, one chunk in memory at a time."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import BlobMissing, Corrupt, NoCheckpoint
from engine.state import PartKind, PartSpec, Rows, Run
from serialization.blobs import BlobId, Bytes
from serialization.buffers import NEW, Buffers
from serialization.manifest import Manifest
from serialization.pipelines import CODEC_SETS, CodecSet
from serialization.snapshot import arriving_state, read_state, write_state
from tests.serialization.states import (
    ATTENTION,
    FOUR_KINDS,
    CountingStore,
    expect_rows,
    logits_edge,
    manifest_of,
    row_bytes,
    state_of,
)


def stored(length: int, codecs: CodecSet = CODEC_SETS["default"]) -> tuple[CountingStore, Manifest]:
    store, state = CountingStore(), state_of(length, edge=logits_edge())
    manifest = manifest_of(state, write_state(store, state, None, 0, codecs))
    store.got.clear()
    return store, manifest


def copied(runs: Sequence[Run]) -> tuple[Rows, ...]:
    """What a memory makes of them."""
    return tuple(
        Rows(run.kind, run.start, run.stop, tuple(part.clone() for part in run.parts)) for run in runs
    )


@pytest.mark.parametrize("codecs", CODEC_SETS.values(), ids=lambda codecs: codecs.name)
@pytest.mark.parametrize("length", [1, 127, 256, 257, 700])
def test_they_are_the_rows_that_reading_the_whole_state_gives(length: int, codecs: CodecSet) -> None:
    store, state = CountingStore(), state_of(length, ATTENTION)
    cuttable = store, manifest_of(state, write_state(store, state, None, 0, codecs))
    for (store, manifest), at in ((stored(length, codecs), length), (cuttable, length - length // 3)):
        whole = read_state(store, manifest, at, workers=1)
        with arriving_state(store, manifest, at) as (state, runs):
            assert state.rows == ()
            expect_rows(replace(state, rows=copied(runs)), at)
            assert [(run.kind, run.start, run.stop) for run in runs] == [
                (run.kind, run.start, run.stop) for run in whole.rows
            ]
        assert (state.tokens, state.spans, state.sampler) == (whole.tokens, whole.spans, whole.sampler)


def test_no_rows_are_fetched_before_they_are_asked_for_and_none_twice() -> None:
    store, manifest = stored(1100)
    rows = {blob.ref.blob for chunk in manifest.chunks for blob in chunk.blobs}
    with arriving_state(store, manifest) as (_, runs):
        assert not rows & set(store.got)
        copied(runs)
        fetched = [blob for blob in store.got if blob in rows]
    assert len(fetched) == len(set(fetched)) == sum(blob.blob is not None for blob in wanted(runs))


def wanted(runs: Sequence[Run]) -> Iterator[object]:
    for run in runs:
        yield run._wanted  # type: ignore[attr-defined]


def test_a_run_is_good_until_the_next_and_what_is_kept_for_good() -> None:
    store, manifest = stored(1024)
    with arriving_state(store, manifest) as (_, runs):
        first, second, *_ = runs
        lent, kept = first.parts, first.kept()
        expected = copied([kept])[0]
        assert all(torch.equal(a, b) for a, b in zip(lent, kept.parts, strict=True))
        other = second.parts
        assert lent[0].data_ptr() == other[0].data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(kept.parts, expected.parts, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first.parts, expected.parts, strict=True))


@pytest.mark.parametrize("fault", [Corrupt, BlobMissing])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_what_is_wrong_with_a_blob_is_told_when_its_rows_are_read(at: int, fault: type[Exception]) -> None:
    store, manifest = stored(1100)
    blob = manifest.chunks[at].blobs[0].ref.blob
    if fault is Corrupt:
        data = bytearray(store.get(blob))
        data[len(data) // 2] ^= 1
        store.faults[blob] = bytes(data)
    else:
        assert store.delete_blob(blob, 0)
    with arriving_state(store, manifest) as (_, runs):
        copied(runs[:at])
        with pytest.raises(fault):
            runs[at].parts  # noqa: B018
        copied(runs[at + 1 :])


def test_a_length_that_cannot_be_resumed_is_refused_at_once() -> None:
    store, manifest = stored(300)
    with pytest.raises(NoCheckpoint), arriving_state(store, manifest, 299):
        pass


class WaitingStore(CountingStore):
    """Each blob takes a while, and how many are being fetched at once is counted."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.most = self._now = 0
        self._lock = threading.Lock()

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.seconds)
        with self._lock:
            self._now -= 1
        return super().get(blob, buffers)


@contextmanager
def waiting(seconds: float) -> Iterator[tuple[WaitingStore, tuple[Run, ...]]]:
    store, state = WaitingStore(0), state_of(4000, FOUR_KINDS[:3])
    manifest = manifest_of(state, write_state(store, state, None, 0))
    store.seconds, store.most = seconds, 0
    with arriving_state(store, manifest, workers=4) as (_, runs):
        yield store, runs


def test_where_fetching_is_waited_for_more_blobs_are_fetched_at_once() -> None:
    with waiting(0.02) as (store, runs):
        started = time.perf_counter()
        copied(runs)
        assert 4 <= store.most <= 5  # by threads, and by who waits
        assert time.perf_counter() - started < 0.02 * len(runs)


def test_where_it_is_not_waited_for_one_is_fetched_ahead() -> None:
    with waiting(0) as (store, runs):
        for run in runs:
            assert run.parts
            time.sleep(0.005)
        assert store.most <= 2


def test_nothing_is_fetched_any_more_when_the_reading_is_over() -> None:
    before = threading.active_count()
    with waiting(0.01) as (store, runs):
        copied(runs[:3])
    fetched = len(store.got)
    time.sleep(0.03)
    assert (len(store.got), threading.active_count()) == (fetched, before)


def test_reading_takes_the_memory_of_a_few_chunks_however_many_there_are() -> None:
    layout = (PartSpec("k", PartKind.TOKEN, 0, "bf16", (16, 64)),)
    chunk = 256 * layout[0].row_nbytes
    for codecs in CODEC_SETS.values():
        store, state = CountingStore(), replace(state_of(32 * 256, layout), rows=())
        rows = Rows(PartKind.TOKEN, 0, 32 * 256, (row_bytes(layout[0], 0, 32 * 256),))
        state = replace(state, rows=(rows,))
        manifest = manifest_of(state, write_state(store, state, None, 0, codecs))
        tracemalloc.start()
        with arriving_state(store, manifest, workers=1) as (_, runs):
            for run in runs:
                assert run.parts
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10 * chunk


def test_readings_at_the_same_time_have_memory_of_their_own() -> None:
    stores = [stored(1024, codecs) for codecs in CODEC_SETS.values()]
    with ExitStack() as readings:
        lent = [readings.enter_context(arriving_state(*each))[1] for each in (*stores, *stores)]
        for number in range(len(lent[0])):
            read = [runs[number].parts for runs in lent]
            places = {part.data_ptr() for parts in read for part in parts if part.numel()}
            assert len(places) == sum(part.numel() > 0 for parts in read for part in parts)
            for parts in read[1:]:
                assert all(torch.equal(a, b) for a, b in zip(read[0], parts, strict=True))


@pytest.mark.parametrize("codecs", CODEC_SETS.values(), ids=lambda codecs: codecs.name)
def test_what_is_kept_stays_when_others_are_read_into_the_same_memory(codecs: CodecSet) -> None:
    kept: dict[int, tuple[Rows, ...]] = {}
    for seed in (1, 2):
        store, state = FillingStore(), state_of(600, seed=seed)
        manifest = manifest_of(state, write_state(store, state, None, 0, codecs))
        with arriving_state(store, manifest) as (_, runs):
            kept[seed] = tuple(run.kept() for run in runs)
    for seed, rows in kept.items():
        expect_rows(replace(state, rows=rows), 600, seed)


@pytest.mark.parametrize("codecs", CODEC_SETS.values(), ids=lambda codecs: codecs.name)
def test_blobs_that_a_store_reads_into_given_memory_make_the_same_rows(codecs: CodecSet) -> None:
    store, state = FillingStore(), state_of(1500)
    manifest = manifest_of(state, write_state(store, state, None, 0, codecs))
    with arriving_state(store, manifest, workers=1) as (_, runs):
        expect_rows(replace(state, rows=copied(runs)), 1500)
        expect_rows(replace(state, rows=copied(runs[:2]) + copied(runs[2:])), 1500)
    assert 1 < len(store.places) <= 3, "each is used again"


class FillingStore(CountingStore):
    """Reads into memory that it is given, as a disk does."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[int] = set()

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes:  # type: ignore[override]
        data = super().get(blob)
        room = buffers.take(len(data))
        room[:] = np.frombuffer(data, np.uint8)
        if buffers is not NEW:
            self.places.add(room.ctypes.data)
        return room.data

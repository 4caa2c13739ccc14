"""Laws of saving and resuming: what is written is new, and what is read is what was there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import (
    BlobMissing,
    Corrupt,
    FingerprintMismatch,
    NoCheckpoint,
    StateError,
)
from engine.state import (
    Fingerprint,
    Layout,
    NextLogits,
    PartKind,
    Pending,
    Provenance,
    SequenceState,
    Span,
    parts_of,
)
from serialization.blobs import BlobClass
from serialization.chunks import CHUNK_TOKENS
from serialization.manifest import PIECES, Manifest
from serialization.pipelines import CODEC_SETS, DEFAULT, RAW, CodecSet
from serialization.resume import (
    MAX_PIECES,
    can_resume_at,
    cut,
    first_new,
    kept_chunks,
    last_resumable,
    resumable_lengths,
)
from serialization.snapshot import WrittenState, missing_blobs, read_state, verify_kept, write_state
from serialization.trim import trimmed
from tests.serialization.states import (
    ATTENTION,
    FOUR_KINDS,
    MEANING,
    WINDOWED,
    CountingStore,
    expect_rows,
    logits_edge,
    manifest_of,
    state_of,
)

LENGTHS = (0, 1, 3, 4, 127, 128, 255, 256, 257, 300, 512, 700)


@pytest.mark.parametrize("codecs", CODEC_SETS.values(), ids=lambda codecs: codecs.name)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_state_of_all_kinds_comes_back_as_it_was(length: int, codecs: CodecSet) -> None:
    store, state = CountingStore(), state_of(length)
    manifest = Manifest.decode(manifest_of(state, write_state(store, state, None, 0, codecs)).encode())
    found = read_state(store, manifest)
    expect_rows(found, length)
    assert found.tokens == state.tokens
    assert found.edge == state.edge
    assert found.sampler == state.sampler
    assert found.spans == state.spans
    for mine, theirs in zip(found.points, state.points, strict=True):
        assert mine.position == theirs.position
        assert all(torch.equal(*pair) for pair in zip(mine.parts, theirs.parts, strict=True))


def test_logits_at_the_edge_come_back_bit_for_bit() -> None:
    store, state = CountingStore(), state_of(9, edge=logits_edge())
    found = read_state(store, manifest_of(state, write_state(store, state, None, 0)))
    assert isinstance(found.edge, NextLogits)
    assert torch.equal(found.edge.logits, logits_edge().logits)


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(workers: int) -> None:
    store, state = CountingStore(), state_of(1100, ATTENTION)
    written = write_state(store, state, None, 0, workers=workers)
    assert written == write_state(CountingStore(), state, None, 0)
    expect_rows(read_state(store, manifest_of(state, written), workers=workers), 1100)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 299, 300, 301, 511, 512, 513, 699])
def test_a_windowed_state_resumes_wherever_its_rows_are_stored(length: int) -> None:
    store, state = CountingStore(), state_of(700, WINDOWED)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    found = read_state(store, manifest, length)
    expect_rows(found, length)
    assert found.edge == Pending(state.tokens[length])
    assert found.length == length


@given(
    length=st.integers(1, 900),
    window_start=st.integers(0, 900),
    middle=st.integers(0, 900),
)
@settings(max_examples=60, deadline=None)
def test_what_can_be_resumed_can_be_read_and_the_rest_is_refused(
    length: int, window_start: int, middle: int
) -> None:
    """Against the law itself, spelt out row by row."""
    store, state = CountingStore(), state_of(length, WINDOWED, window_start=min(window_start, length))
    manifest = manifest_of(state, write_state(store, state, None, 0, RAW))
    at = min(middle, length)
    able = at == 0 or max(0, at - 300) >= window_start
    assert can_resume_at(manifest, at) == able
    if able:
        expect_rows(read_state(store, manifest, at, workers=1), at)
    else:
        with pytest.raises(NoCheckpoint):
            read_state(store, manifest, at)
    assert can_resume_at(manifest, last_resumable(manifest, at))
    brute = max(each for each in range(at + 1) if can_resume_at(manifest, each))
    assert last_resumable(manifest, at) == brute


def test_point_state_allows_its_own_positions_alone() -> None:
    store, first = CountingStore(), state_of(100)
    before = manifest_of(first, write_state(store, first, None, 0))
    second = state_of(130, since=first_new(before, state_of(130).tokens, state_of(130).spans, 100))
    manifest = manifest_of(second, write_state(store, second, before, 100))
    assert resumable_lengths(manifest) == (range(0, 1), range(100, 101), range(130, 131))
    expect_rows(read_state(store, manifest, 100), 100)
    with pytest.raises(NoCheckpoint):
        read_state(store, manifest, 101)


def test_checkpoints_above_a_rewind_or_of_other_tokens_are_not_kept() -> None:
    store, state = CountingStore(), state_of(100)
    first = manifest_of(state, write_state(store, state, None, 0))
    state = state_of(130)
    both = manifest_of(state, write_state(store, state, first, 100))
    longer = state_of(200)
    other = replace(longer, tokens=(1, *longer.tokens[1:]))
    for last, untouched, kept in ((longer, 130, [100, 130]), (longer, 110, [100]), (other, 200, [])):
        written = write_state(store, last, both, untouched)
        assert [each.position for each in written.checkpoints] == [*kept, 200]


def test_a_checkpoint_that_is_named_already_is_not_written_again() -> None:
    store, state = CountingStore(), state_of(100)
    first = manifest_of(state, write_state(store, state, None, 0))
    store.num_puts = 0
    ended = replace(state, edge=Pending(3))
    assert write_state(store, ended, first, 100).checkpoints == first.checkpoints
    assert store.num_puts == 0


def test_checkpoints_beyond_the_budget_go_and_the_last_one_never() -> None:
    store, manifest = CountingStore(), None
    for length in (100, 130, 160, 190):
        state = state_of(length)
        written = write_state(store, state, manifest, length, point_budget=3 * point_nbytes_of(state))
        manifest = manifest_of(state, written)
    assert [each.position for each in manifest.checkpoints] == [100, 160, 190]
    none_fits = write_state(store, state_of(220), manifest, 190, point_budget=0)
    assert [each.position for each in none_fits.checkpoints] == [220]


def test_a_checkpoint_that_does_not_fit_is_not_written() -> None:
    state = state_of(220)
    more = replace(state, points=(replace(state.points[0], position=100), *state.points))
    alone, both = (write_state(CountingStore(), each, None, 0, point_budget=0) for each in (state, more))
    assert (both.num_blobs, both.nbytes) == (alone.num_blobs, alone.nbytes)


def point_nbytes_of(state: SequenceState) -> int:
    return sum(spec.row_nbytes for spec in parts_of(state.layout, PartKind.POINT))


def test_as_many_checkpoints_are_read_as_are_asked_for() -> None:
    store, manifest = CountingStore(), None
    for length in (100, 130, 160):
        state = state_of(length)
        manifest = manifest_of(state, write_state(store, state, manifest, length))
    assert [point.position for point in read_state(store, manifest).points] == [160]
    assert [point.position for point in read_state(store, manifest, num_points=2).points] == [130, 160]
    assert [point.position for point in read_state(store, manifest, 130, num_points=2).points] == [100, 130]


def test_a_turn_writes_its_own_rows_alone() -> None:
    store, first = CountingStore(), state_of(4000, ATTENTION)
    before = manifest_of(first, write_state(store, first, None, 0))
    tokens, spans = state_of(4050, ATTENTION).tokens, state_of(4050, ATTENTION).spans
    since = first_new(before, tokens, spans, 4000)
    assert since == 4000
    second = state_of(4050, ATTENTION, since=since)
    num_puts = store.num_puts
    written = write_state(store, second, before, 4000)
    assert written.num_blobs == store.num_puts - num_puts == 1
    assert written.chunks[:-1] == before.chunks
    assert sum(blob.ref.raw_nbytes for blob in written.chunks[-1].blobs) == sum(
        50 * spec.row_nbytes for spec in ATTENTION
    )
    expect_rows(read_state(store, manifest_of(second, written)), 4050)


def turns_of(
    store: CountingStore, lengths: Sequence[int], layout: Layout = FOUR_KINDS
) -> Iterator[tuple[Manifest, WrittenState]]:
    """The manifest after each turn, and what was written for it."""
    manifest = None
    for length in lengths:
        synced = 0 if manifest is None else manifest.length
        whole = state_of(length, layout)
        since = first_new(manifest, whole.tokens, whole.spans, synced)
        state = trimmed(state_of(length, layout, since=since), manifest, synced)
        written = write_state(store, state, manifest, synced, RAW)
        manifest = Manifest.decode(manifest_of(state, written).encode())
        yield manifest, written


def bounds(manifest: Manifest) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for chunk in manifest.chunks]


def test_short_turns_make_pieces_until_the_chunk_is_full_and_then_it_is_the_one_of_any_session() -> None:
    at_once = CountingStore()
    ((expected, _),) = turns_of(at_once, [256], ATTENTION)
    store = CountingStore()
    turns = [manifest for manifest, _ in turns_of(store, range(50, 351, 50), ATTENTION)]
    assert [bounds(manifest) for manifest in turns[:5]] == [
        [(start, start + 50) for start in range(0, 50 * count, 50)] for count in range(1, 6)
    ]
    assert bounds(turns[5]) == [(0, 256), (256, 300)]
    assert turns[5].chunks[0] == expected.chunks[0]
    assert bounds(turns[6]) == [(0, 256), (256, 300), (300, 350)]
    assert [PIECES in manifest.features for manifest in turns] == [False, *[True] * 4, False, True]


def test_a_run_that_is_filled_to_its_end_has_no_pieces() -> None:
    turns = [bounds(manifest) for manifest, _ in turns_of(CountingStore(), (250, 256, 256, 260))]
    assert turns == [[(0, 250)], [(0, 256)], [(0, 256)], [(0, 256), (256, 260)]]


def test_a_save_of_nothing_new_writes_nothing_however_many_pieces_there_are() -> None:
    lengths = [*range(10, 10 * MAX_PIECES + 1, 10), 10 * MAX_PIECES]
    *_, (before, _), (manifest, written) = turns_of(CountingStore(), lengths, ATTENTION)
    assert (written.num_blobs, manifest.chunks) == (0, before.chunks)


def test_many_pieces_are_made_one_again() -> None:
    store = CountingStore()
    turns = [bounds(manifest) for manifest, _ in turns_of(store, range(10, 101, 10))]
    assert [len(chunks) for chunks in turns] == [*range(1, MAX_PIECES + 1), 1, 2]
    assert turns[MAX_PIECES] == [(0, 10 * (MAX_PIECES + 1))]


@given(more=st.lists(st.integers(1, 150), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_session_of_pieces_can_be_gone_back_to_as_ever(more: list[int]) -> None:
    lengths = list(itertools.accumulate(more))
    store = CountingStore()
    for (manifest, written), new in zip(turns_of(store, lengths), more, strict=True):
        for length in (each for each in lengths if each <= manifest.length):
            expect_rows(read_state(store, manifest, length, workers=1), length)
        assert all(chunk in manifest.chunks for chunk in written.chunks)
        assert len([start for start, _ in bounds(manifest) if start % CHUNK_TOKENS]) < MAX_PIECES
        assert written.num_blobs <= 4 * (new // CHUNK_TOKENS + 2)


@given(
    first=st.integers(0, 800),
    back=st.integers(0, 800),
    second=st.integers(0, 1200),
    window_start=st.integers(0, 800),
)
@settings(max_examples=60, deadline=None)
def test_saves_after_any_rewind_resume_at_their_end(
    first: int, back: int, second: int, window_start: int
) -> None:
    """Rows above the rewind are new ones (seed 1), and must not be taken from the save before."""
    store, untouched = CountingStore(), min(back, first)
    state = state_of(first, WINDOWED, window_start=min(window_start, max(0, first - 300)))
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    length = max(second, untouched)
    wanted = state_of(length, WINDOWED)
    since = first_new(before, wanted.tokens, wanted.spans, untouched)
    assert since <= untouched
    state = state_of(length, WINDOWED, since=since, window_start=max(0, length - 300))
    fresh = state_of(length, WINDOWED, since=since, window_start=max(0, length - 300), seed=1)
    mixed = replace(
        state,
        rows=tuple(
            replace(
                run,
                parts=tuple(
                    torch.cat([part[: max(0, untouched - run.start)], new[max(0, untouched - run.start) :]])
                    for part, new in zip(run.parts, other.parts, strict=True)
                ),
            )
            for run, other in zip(state.rows, fresh.rows, strict=True)
        ),
    )
    manifest = manifest_of(mixed, write_state(store, mixed, before, untouched, RAW))
    found = read_state(store, Manifest.decode(manifest.encode()), workers=1)
    for kind in (PartKind.TOKEN, PartKind.WINDOW):
        new = {run.start: run for run in found.rows_of(kind)}
        for run in mixed.rows_of(kind):
            for other in new.values():
                low, high = max(run.start, other.start), min(run.stop, other.stop)
                for mine, theirs in zip(run.parts, other.parts, strict=True):
                    if low < high:
                        assert torch.equal(
                            mine[low - run.start : high - run.start],
                            theirs[low - other.start : high - other.start],
                        )
    assert can_resume_at(manifest, length)


def test_rows_that_were_touched_or_are_of_another_provenance_are_written_anew() -> None:
    store, state = CountingStore(), state_of(1000, ATTENTION)
    before = manifest_of(state, write_state(store, state, None, 0))
    assert first_new(before, state.tokens, state.spans, 1000) == 1000
    assert first_new(before, state.tokens, state.spans, 600) == 512
    other = (Span(0, 300, Provenance.COMPUTED), Span(300, 1000, Provenance.SHIFTED))
    assert first_new(before, state.tokens, other, 1000) == 256
    assert first_new(before, (*state.tokens[:400], 1, *state.tokens[401:]), state.spans, 1000) == 256
    assert first_new(before, state.tokens[:999], state.spans, 1000) == 768
    assert first_new(None, state.tokens, state.spans, 1000) == 0


def test_a_chunk_without_the_window_rows_that_the_new_length_needs_is_not_kept() -> None:
    store, state = CountingStore(), state_of(700, WINDOWED, window_start=400)
    before = manifest_of(state, write_state(store, state, None, 0))
    shorter = state_of(600, WINDOWED)
    assert [chunk.start for chunk in kept_chunks(before, shorter.tokens, shorter.spans, 600)] == [0]
    longer = state_of(900, WINDOWED)
    assert [chunk.start for chunk in kept_chunks(before, longer.tokens, longer.spans, 700)] == [0, 256]


def test_a_cut_manifest_is_written_without_any_rows() -> None:
    store, state = CountingStore(), state_of(700, WINDOWED)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    shorter = Manifest.decode(cut(manifest, 600).encode())
    assert shorter.length == 600
    assert shorter.edge == Pending(state.tokens[600])
    assert {ref.blob for ref in shorter.blobs()} <= {ref.blob for ref in manifest.blobs()}
    expect_rows(read_state(store, shorter), 600)
    again = state_of(650, WINDOWED, since=first_new(shorter, state.tokens[:650], state.spans, 600))
    assert first_new(shorter, again.tokens, again.spans, 600) == 512
    expect_rows(read_state(store, manifest_of(again, write_state(store, again, shorter, 600))), 650)


def test_only_the_window_rows_that_are_needed_are_fetched() -> None:
    store, state = CountingStore(), state_of(2100, WINDOWED)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    store.got.clear()
    found = read_state(store, manifest, workers=1)
    windows = found.rows_of(PartKind.WINDOW)
    assert (windows[0].start, windows[-1].stop) == (1799, 2100)
    assert len(store.got) == 9 + 2


def test_the_last_partial_chunk_gets_all_of_its_window_rows() -> None:
    """Though the window alone would need fewer: the next save writes that chunk anew."""
    layout = WINDOWED[:4]  # window 16
    store, state = CountingStore(), state_of(500, layout)
    found = read_state(store, manifest_of(state, write_state(store, state, None, 0)))
    assert found.rows_of(PartKind.WINDOW)[0].start == 256


def test_another_model_or_layout_is_never_mixed_in() -> None:
    store, state = CountingStore(), state_of(300, ATTENTION)
    before = manifest_of(state, write_state(store, state, None, 0))
    with pytest.raises(FingerprintMismatch, match="rope"):
        write_state(
            store, replace(state, fingerprint=Fingerprint({**MEANING.meaning, "rope": 2})), before, 300
        )
    with pytest.raises(FingerprintMismatch, match="layout"):
        before.refuse_other(state.fingerprint, WINDOWED)


def test_a_state_that_lacks_rows_is_not_written() -> None:
    with pytest.raises(Corrupt):
        write_state(CountingStore(), state_of(700, ATTENTION, since=300), None, 0)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_blob_that_is_gone_or_another_is_refused(workers: int) -> None:
    store, state = CountingStore(), state_of(900, edge=logits_edge())
    manifest = manifest_of(state, write_state(store, state, None, 0))
    read_state(store, manifest, workers=workers)
    read = set(store.got)
    assert len(read) == len(list(manifest.blobs())) - 2  # no need of the first two chunks' window rows
    for ref in manifest.blobs():
        if ref.blob not in read:
            continue
        data = store.get(ref.blob)
        for fault in (data[:-1], data + b"\0", data[:40] + bytes([data[40] ^ 1]) + data[41:], b""):
            store.faults = {ref.blob: fault}
            with pytest.raises(Corrupt):
                read_state(store, manifest, workers=workers)
        store.faults = {}
        assert store.delete_blob(ref.blob, 0)
        with pytest.raises(BlobMissing):
            read_state(store, manifest, workers=workers)
        assert missing_blobs(store, manifest) == (ref.blob,)
        with pytest.raises(BlobMissing):
            verify_kept(store, manifest)
        store.put(BlobClass(ref.blob.split("-")[0]), data)
    verify_kept(store, manifest)


def test_a_blob_of_the_right_digest_in_the_wrong_place_is_refused() -> None:
    store, state = CountingStore(), state_of(900)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    chunks = list(manifest.chunks)
    swapped = replace(
        manifest,
        chunks=(
            replace(
                chunks[0],
                blobs=(replace(chunks[0].blobs[0], ref=chunks[1].blobs[0].ref), *chunks[0].blobs[1:]),
            ),
            *chunks[1:],
        ),
    )
    with pytest.raises(Corrupt):
        read_state(store, swapped)


def test_declared_sizes_are_compared_before_a_blob_is_fetched() -> None:
    store, state = CountingStore(), state_of(100, ATTENTION)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    (chunk,) = manifest.chunks
    blob = replace(chunk.blobs[0], ref=replace(chunk.blobs[0].ref, raw_nbytes=2**30))
    store.got.clear()
    with pytest.raises(StateError):
        read_state(store, replace(manifest, chunks=(replace(chunk, blobs=(blob,)),)))
    assert store.got == []


def test_a_manifest_that_lies_about_a_blobs_stored_size_is_refused() -> None:
    store, state = CountingStore(), state_of(100, ATTENTION)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    (chunk,) = manifest.chunks
    (blob,) = chunk.blobs
    wrong = replace(blob, ref=replace(blob.ref, nbytes=blob.ref.nbytes - 1))
    with pytest.raises(Corrupt):
        read_state(store, replace(manifest, chunks=(replace(chunk, blobs=(wrong,)),)))


def test_point_state_of_another_size_than_its_parts_is_refused() -> None:
    store, state = CountingStore(), state_of(20)
    manifest = manifest_of(state, write_state(store, state, None, 0))
    (checkpoint,) = manifest.checkpoints
    assert checkpoint.ref is not None
    wrong = replace(checkpoint, ref=replace(checkpoint.ref, raw_nbytes=1))
    with pytest.raises(Corrupt, match="point state"):
        read_state(store, replace(manifest, checkpoints=(wrong,)))


def test_equal_states_are_stored_once() -> None:
    store = CountingStore()
    for _ in range(3):
        write_state(store, state_of(700), None, 0, DEFAULT)
    assert store.num_puts == 3 * len(store.blobs())


def test_the_layout_of_the_tests_has_all_four_kinds() -> None:
    assert {spec.kind for spec in FOUR_KINDS} == set(PartKind)

"""Codec, level, chunk size, cut and windows: other bytes and fewer rows, but never other ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BlobMissing, ConfigError, Corrupt, LimitExceeded, NoCheckpoint
from engine.state import (
    Layout,
    NextLogits,
    PartKind,
    PartSpec,
    Pending,
    Point,
    Provenance,
    Span,
    parts_of,
)
from serialization.chunks import CHUNK_SIZES, read_header
from serialization.manifest import Manifest
from serialization.pipelines import CODEC_SETS, DEFAULT, RAW
from serialization.reencode.plan import Fate
from serialization.reencode.planning import plan_reencoding
from serialization.reencode.reencode import reencode
from serialization.reencode.reencoding import Reencoding, Windows
from serialization.resume import MAX_PIECES, can_resume_at, cut, first_new, resumable_lengths
from serialization.snapshot import read_state, write_state
from serialization.trim import trimmed
from tests.serialization.states import (
    ATTENTION,
    FOUR_KINDS,
    WINDOWED,
    CountingStore,
    drafted,
    expect_draft,
    expect_rows,
    manifest_of,
    state_of,
)

LENGTHS = st.sampled_from([1, 63, 64, 65, 255, 256, 257, 300, 511, 700, 1030])


def saved(store: CountingStore, length: int, window_start: int = 0) -> Manifest:
    state = drafted(state_of(length, window_start=window_start))
    return manifest_of(state, write_state(store, state, None, 0, RAW))


@given(
    LENGTHS,
    st.sampled_from([None, *CODEC_SETS]),
    st.none() | st.sampled_from([1, 3, 19]),
    st.none() | st.sampled_from(CHUNK_SIZES),
)
@settings(max_examples=60, deadline=None)
def test_every_row_stays_what_it_was(
    length: int, codec: str | None, level: int | None, chunk_tokens: int | None
) -> None:
    store, target = CountingStore(), CountingStore()
    before = saved(store, length)
    if codec == "raw" and level is not None:
        with pytest.raises(ConfigError):
            Reencoding(codec=codec, level=level)
        return
    made = reencode(store, before, target, Reencoding(codec=codec, level=level, chunk_tokens=chunk_tokens))
    assert Manifest.decode(made.encode()) == made
    state = read_state(target, made)
    expect_rows(state, length)
    expect_draft(state, length)
    assert state.points[-1].position == length
    assert (made.tokens, made.spans, made.fingerprint) == (before.tokens, before.spans, before.fingerprint)
    assert made.chunk_tokens == (chunk_tokens or 256)
    assert not made.reencoded
    assert all(target.has([ref.blob for ref in made.blobs()]))


@given(LENGTHS, st.sampled_from(CHUNK_SIZES), st.sampled_from(CHUNK_SIZES))
@settings(max_examples=40, deadline=None)
def test_there_and_back_is_where_it_began(length: int, size: int, other: int) -> None:
    store = CountingStore()
    before = saved(store, length)
    there = reencode(store, before, store, Reencoding(codec="raw", chunk_tokens=size))
    further = reencode(store, there, store, Reencoding(codec="raw", chunk_tokens=other))
    assert reencode(store, further, store, Reencoding(codec="raw", chunk_tokens=256)) == before


@given(
    st.sampled_from([ATTENTION, WINDOWED]),
    st.sampled_from(CHUNK_SIZES),
    st.integers(1, 900),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 300)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_a_session_goes_on_in_chunks_of_its_own_size(
    layout: Layout, size: int, length: int, turns: list[tuple[int, int]]
) -> None:
    """Turns are saved, each after taking back some of the tokens: a save writes what is new in chunks of
    that size, names the others again, and what could be gone back to still can."""
    store = CountingStore()
    first = trimmed(state_of(length, layout), None, 0)
    manifest = manifest_of(first, write_state(store, first, None, 0, RAW))
    manifest = reencode(store, manifest, store, Reencoding(chunk_tokens=size))
    lengths = [length]
    for more, back in turns:
        synced = max(0, manifest.length - back)
        if not can_resume_at(manifest, synced):
            synced = manifest.length
        lengths = [each for each in lengths if each <= synced]
        whole = state_of(synced + more, layout)
        since = first_new(manifest, whole.tokens, whole.spans, synced)
        if layout == ATTENTION:
            run = synced // size * size
            ends = [chunk.stop for chunk in manifest.chunks if run <= chunk.start and chunk.stop <= synced]
            anew = run + size <= whole.length or len(ends) >= MAX_PIECES
            assert since == (run if anew or not ends else ends[-1])
        state = trimmed(state_of(synced + more, layout, since=since), manifest, synced)
        written = write_state(store, state, manifest, synced, RAW)
        assert written.chunk_tokens == size
        after = replace(manifest_of(state, written), chunk_tokens=size)
        assert after.encode()
        assert {chunk for chunk in manifest.chunks if chunk.stop <= since} <= set(after.chunks)
        manifest = after
        lengths.append(manifest.length)
        for each in lengths:
            expect_rows(read_state(store, manifest, each), each)


def test_what_need_not_change_is_carried_as_it_is() -> None:
    store, target = CountingStore(), CountingStore()
    before = saved(store, 700)
    assert reencode(store, before, target, Reencoding()) == before
    assert target.blobs() == store.blobs()
    for blob in store.blobs():
        assert target.get(blob) == store.get(blob)


def test_the_old_state_is_left_alone() -> None:
    store = CountingStore()
    before = saved(store, 700)
    data = {blob: store.get(blob) for blob in store.blobs()}
    encoded = before.encode()
    reencode(store, before, store, Reencoding(codec="default", chunk_tokens=64, cut=0))
    reencode(store, before, store, Reencoding(codec="default", chunk_tokens=64))
    assert before.encode() == encoded
    assert all(store.get(blob) == kept for blob, kept in data.items())
    expect_rows(read_state(store, before), 700)


@pytest.mark.parametrize("name", CODEC_SETS)
def test_blobs_are_encoded_as_they_were_asked_to_be(name: str) -> None:
    store = CountingStore()
    made = reencode(store, saved(store, 300), store, Reencoding(codec=name))
    for ref in made.blobs():
        for section in read_header(store.get(ref.blob)).sections:
            assert section.pipeline in ((), CODEC_SETS[name].pipeline(section.dtype))


def test_rows_point_state_and_logits_are_encoded_anew_alike() -> None:
    store = CountingStore()
    rows = state_of(300, FOUR_KINDS[:3])
    flat = tuple(torch.zeros_like(part) for part in rows.rows[0].parts)
    still = (Point(300, (torch.zeros(512, dtype=torch.uint8),)),)
    layout = (*FOUR_KINDS[:3], PartSpec("conv", PartKind.POINT, 5, "f32", (128,)))
    state = replace(rows, layout=layout, rows=(replace(rows.rows[0], parts=flat),), points=still)
    state = replace(state, edge=NextLogits(torch.zeros(500)))
    before = manifest_of(state, write_state(store, state, None, 0, DEFAULT))
    for wanted, packed in (("raw", False), ("default", True)):
        before = reencode(store, before, store, Reencoding(codec=wanted))
        headers = [read_header(store.get(ref.blob)) for ref in before.blobs()]
        assert {header.kind for header in headers} == {"token", "point", "logits"}
        assert {bool(section.pipeline) for header in headers for section in header.sections} == {packed}


def test_a_level_is_in_the_blobs_that_have_it_and_searches_harder() -> None:
    """Of rows that repeat themselves now and then."""
    store = CountingStore()
    state = state_of(1000, FOUR_KINDS[:1])
    few = tuple(part % 3 for part in state.rows[0].parts)
    state = replace(state, rows=(replace(state.rows[0], parts=few),))
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    sizes = {}
    for level in (1, 19):
        made = reencode(store, before, store, Reencoding(level=level))
        modes = {
            mode
            for ref in made.blobs()
            for section in read_header(store.get(ref.blob)).sections
            for codec in section.pipeline
            for mode in codec.config.get("modes", ())  # type: ignore[attr-defined]
        }
        assert f"zstd-{level}" in modes
        assert modes <= {"stored", "huffman", f"zstd-{level}"}
        sizes[level] = sum(ref.nbytes for ref in made.blobs())
    assert sizes[19] < sizes[1]


@pytest.mark.parametrize("level", [0, 20, -1])
def test_a_level_that_there_is_not_is_refused(level: int) -> None:
    with pytest.raises(ConfigError, match="level"):
        Reencoding(level=level)


@pytest.mark.parametrize("size", [0, 1, 63, 100, 8192, 32])
def test_a_size_that_chunks_cannot_have_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="chunks of"):
        Reencoding(chunk_tokens=size)


def test_logits_stay_what_they_were() -> None:
    store = CountingStore()
    logits = torch.linspace(-4, 4, 99)
    state = state_of(300, edge=NextLogits(logits))
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    for wanted in (Reencoding(), Reencoding(codec="default", chunk_tokens=64)):
        edge = read_state(store, reencode(store, before, store, wanted)).edge
        assert isinstance(edge, NextLogits)
        assert torch.equal(edge.logits, logits)


# --- cuts ---------------------------------------------------------------------------------------


@given(st.integers(1, 700), st.none() | st.sampled_from(CHUNK_SIZES))
@settings(max_examples=40, deadline=None)
def test_a_cut_has_the_rows_of_its_tokens_and_no_others(at: int, size: int | None) -> None:
    store, target = CountingStore(), CountingStore()
    state = state_of(700, FOUR_KINDS[:5])
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    made = reencode(store, before, target, Reencoding(cut=at, chunk_tokens=size))
    assert made.tokens == before.tokens[:at]
    assert made.chunks[-1].stop == at
    expect_rows(read_state(target, made), at)
    if at < 700:
        assert made.edge == Pending(before.tokens[at])


def test_a_cut_to_nothing_is_an_empty_session() -> None:
    store = CountingStore()
    made = reencode(store, saved(store, 300), store, Reencoding(cut=0))
    assert (made.tokens, made.chunks, made.edge, made.draft) == ((), (), None, None)
    assert Manifest.decode(made.encode()) == made


def test_a_cut_where_nobody_can_go_on_names_the_nearest_places() -> None:
    store = CountingStore()
    state = replace(state_of(700), points=(*state_of(300).points, *state_of(700).points))
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    with pytest.raises(NoCheckpoint, match=r"before is 300, the nearest behind is 700") as refused:
        reencode(store, before, store, Reencoding(cut=500))
    assert (refused.value.details["nearest"], refused.value.details["above"]) == (300, 700)
    with pytest.raises(NoCheckpoint, match=r"at 800 tokens; the nearest before is 700$"):
        reencode(store, before, store, Reencoding(cut=800))
    assert reencode(store, before, store, Reencoding(cut=300)).length == 300


# --- windows ------------------------------------------------------------------------------------


def window_rows(manifest: Manifest) -> list[tuple[int, int]]:
    found = [(chunk.blob(PartKind.WINDOW), chunk.stop) for chunk in manifest.chunks]
    return [(blob.start, stop) for blob, stop in found if blob is not None]


@pytest.mark.parametrize("size", [None, 64, 1024])
def test_trimmed_windows_are_those_that_going_on_needs(size: int | None) -> None:
    store = CountingStore()
    state = state_of(1000, WINDOWED)
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    assert window_rows(before)[0][0] == 0
    wanted = Reencoding(windows=Windows.NEEDED, chunk_tokens=size)
    made = reencode(store, before, store, wanted)
    assert (window_rows(made)[0][0], window_rows(made)[-1][1]) == (1000 - 300 - 1, 1000)
    expect_rows(read_state(store, made), 1000)
    assert can_resume_at(made, 999)
    assert not can_resume_at(made, 998)
    (gone,) = [item for item in plan_reencoding(before, wanted).items if item.what == "tokens' window rows"]
    assert (gone.fate, gone.count, gone.becomes) == (Fate.DROPPED, 699, 0)
    assert gone.why.startswith("going on needs the last ones alone")
    assert gone.nbytes == 699 * sum(spec.row_nbytes for spec in parts_of(WINDOWED, PartKind.WINDOW))


def test_checkpoints_go_with_their_window_rows() -> None:
    store = CountingStore()
    state = replace(state_of(1000), points=tuple(state_of(at).points[0] for at in (200, 699 + 300, 1000)))
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    made = reencode(store, before, store, Reencoding(windows=Windows.NEEDED))
    assert [each.position for each in made.checkpoints] == [999, 1000]
    assert can_resume_at(made, 999)


def test_windows_that_were_dropped_are_not_to_be_had_again() -> None:
    store = CountingStore()
    full = state_of(1000, WINDOWED)
    before = manifest_of(full, write_state(store, full, None, 0, RAW))
    assert reencode(store, before, store, Reencoding(windows=Windows.FULL)) == before
    made = reencode(store, before, store, Reencoding(windows=Windows.NEEDED))
    with pytest.raises(
        NoCheckpoint, match=r"rows of \[699, 1,000\) of 1,000 tokens.*reading the tokens again"
    ):
        reencode(store, made, store, Reencoding(windows=Windows.FULL))
    without = state_of(1000, FOUR_KINDS[:5])
    plain = manifest_of(without, write_state(store, without, None, 0, RAW))
    assert reencode(store, plain, store, Reencoding(windows=Windows.FULL)) == plain


def test_larger_chunks_cannot_name_window_rows_before_a_gap_and_the_plan_says_so() -> None:
    store = CountingStore()
    first = state_of(300, WINDOWED)
    one = manifest_of(first, write_state(store, trimmed(first, None, 0), None, 0, RAW))
    later = state_of(1000, WINDOWED, since=256)
    written = write_state(store, trimmed(later, one, 300), one, 300, RAW)
    before = manifest_of(later, written)
    assert can_resume_at(before, 300)
    wanted = Reencoding(chunk_tokens=1024)
    plan = plan_reencoding(before, wanted)
    made = reencode(store, before, store, wanted)
    assert not can_resume_at(made, 300)
    expect_rows(read_state(store, made), 1000)
    told = {item.what: item for item in plan.items if item.fate is Fate.DROPPED}
    lost = sum(map(len, resumable_lengths(before))) - sum(map(len, resumable_lengths(made)))
    assert told["lengths to cut back to"].count == lost
    assert told["tokens' window rows"].nbytes > 0
    assert "cannot name them" in told["tokens' window rows"].why
    smaller = reencode(store, before, store, Reencoding(chunk_tokens=64))
    assert resumable_lengths(smaller) == resumable_lengths(before)


# --- what is wrong ------------------------------------------------------------------------------


def test_damage_and_loss_are_told_and_nothing_comes_of_it() -> None:
    for wanted in (Reencoding(), Reencoding(codec="raw"), Reencoding(chunk_tokens=64)):
        store, target = CountingStore(), CountingStore()
        before = saved(store, 700)
        blob = before.chunks[1].blobs[0].ref.blob
        store.faults[blob] = store.get(blob)[:-1] + b"?"
        with pytest.raises(Corrupt):
            reencode(store, before, target, wanted)
        del store.faults[blob]
        store.delete_blob(blob, 0)
        with pytest.raises(BlobMissing):
            reencode(store, before, target, wanted)


def test_rows_that_were_given_up_stay_so() -> None:
    """A chunk without rows, and one without window rows, as retention leaves them."""
    store = CountingStore()
    before = saved(store, 700)
    first, *rest = before.chunks
    left = replace(before, chunks=(replace(first, blobs=first.blobs[:2]), *rest))
    for size in (64, 256, 512):
        made = reencode(store, left, store, Reencoding(chunk_tokens=size))
        assert resumable_lengths(made) == resumable_lengths(left)
    bare = replace(before, chunks=tuple(replace(chunk, blobs=()) for chunk in before.chunks), draft=None)
    bare = replace(bare, checkpoints=())
    made = reencode(store, bare, store, Reencoding(chunk_tokens=64))
    assert not any(chunk.blobs for chunk in made.chunks)
    (again,) = [item for item in plan_reencoding(bare, Reencoding()).items if item.fate is Fate.RECOMPUTED]
    assert (again.what, again.count) == ("tokens", 700)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_chunk_of_which_rows_are_missing_has_none(missing: int) -> None:
    store = CountingStore()
    state = state_of(1000, FOUR_KINDS[:5])
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    chunks = list(before.chunks)
    chunks[missing] = replace(chunks[missing], blobs=())
    left = replace(before, chunks=tuple(chunks))
    assert resumable_lengths(left)[-1][-1] == 256 * missing
    smaller = reencode(store, left, store, Reencoding(chunk_tokens=64))
    assert resumable_lengths(smaller) == resumable_lengths(left)
    for at in (100, 256)[: 2 * missing]:
        expect_rows(read_state(store, smaller, at), at)
    larger = reencode(store, left, store, Reencoding(chunk_tokens=512))
    assert [bool(chunk.blobs) for chunk in larger.chunks] == [False, True]
    items = plan_reencoding(left, Reencoding(chunk_tokens=512)).items
    lost = [item.count for item in items if item.what == "lengths to cut back to"]
    assert lost == [256] * missing


@pytest.mark.parametrize(("size", "first"), [(64, 1199), (256, 1199), (1024, 1024), (4096, 0)])
def test_a_resume_reads_what_its_next_save_writes_anew(size: int, first: int) -> None:
    """The window rows of the last partial chunk, so that what could be gone back to still can."""
    store = CountingStore()
    state = state_of(1500, WINDOWED)
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    made = reencode(store, before, store, Reencoding(chunk_tokens=size))
    assert read_state(store, made).rows_of(PartKind.WINDOW)[0].start == first


def test_chunks_that_would_be_too_many_or_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    before = saved(store, 700)
    monkeypatch.setattr("serialization.reencode.planning.MAX_CHUNKS", 10)
    with pytest.raises(LimitExceeded, match="chunks"):
        reencode(store, before, store, Reencoding(chunk_tokens=64))
    monkeypatch.setattr("serialization.reencode.planning.MAX_RAW_NBYTES", 40_000)
    assert not plan_reencoding(before, Reencoding()).refusals
    with pytest.raises(LimitExceeded, match="rows of one blob"):
        reencode(store, before, store, Reencoding(chunk_tokens=1024))


def test_a_cut_session_whose_last_chunk_has_more_rows_is_read_to_its_end_alone() -> None:
    store, target = CountingStore(), CountingStore()
    state = state_of(500, FOUR_KINDS[:5])
    before = cut(manifest_of(state, write_state(store, state, None, 0, RAW)), 300)
    assert before.chunks[-1].stop == 500
    made = reencode(store, before, target, Reencoding())
    assert made.chunks[-1].stop == 300
    expect_rows(read_state(target, made), 300)


def test_nothing_is_in_memory_but_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each blob is read once, and right before what is made of it is put."""
    store, target = CountingStore(), CountingStore()
    state = state_of(4096, FOUR_KINDS[:3])
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    seen: list[int] = []
    put = target.put

    def watched(*args: object) -> object:
        seen.append(len(store.got))
        return put(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "put", watched)
    reencode(store, before, target, Reencoding(chunk_tokens=512))
    assert sorted(store.got) == sorted(ref.blob for ref in before.blobs())
    assert seen == [2, 4, 6, 8, 10, 12, 14, 16]


def test_who_watches_is_told_how_far_it_is() -> None:
    store, told = CountingStore(), list[tuple[int, int]]()
    before = saved(store, 700)
    wanted = Reencoding(codec="raw")
    reencode(store, before, store, wanted, progress=lambda done, total: told.append((done, total)))
    done = [each for each, _ in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]
    assert len({total for _, total in told}) == 1


def test_spans_that_are_not_computed_stay_so() -> None:
    store = CountingStore()
    spans = (Span(0, 100, Provenance.SHIFTED), Span(100, 300, Provenance.COMPUTED))
    state = state_of(300, spans=spans)
    before = manifest_of(state, write_state(store, state, None, 0, RAW))
    assert reencode(store, before, store, Reencoding(codec="default")).spans == spans

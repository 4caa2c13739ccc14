"""Laws of a drafter's state: it is written, named, cut and read like its target's, and with it."""

from __future__ import annotations

import io
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UnknownFeature
from engine.state import Fingerprint, Layout, PartKind, SequenceState, parts_of
from serialization.archive import read_archive, write_archive
from serialization.manifest import Manifest
from serialization.pipelines import RAW
from serialization.resume import cut, draft_within, first_new, first_new_of_draft
from serialization.snapshot import read_state, write_state
from serialization.trim import trimmed
from tests.serialization.spelling import record_of
from tests.serialization.states import (
    ATTENTION,
    DRAFTED,
    FOUR_KINDS,
    WINDOWED,
    CountingStore,
    drafted,
    expect_draft,
    expect_rows,
    manifest_of,
    state_of,
)

TOKENS = parts_of(DRAFTED, PartKind.TOKEN)
WINDOWS = parts_of(DRAFTED, PartKind.WINDOW)
POINTS = parts_of(DRAFTED, PartKind.POINT)


def saved(store: CountingStore, state: SequenceState) -> Manifest:
    return Manifest.decode(manifest_of(state, write_state(store, state, None, 0, RAW)).encode())


def next_turn(
    store: CountingStore, length: int, before: Manifest | None, layout: Layout, behind: int = 0
) -> Manifest:
    """The next turn of a conversation, at `length` tokens, as a session saves it; the drafter has read all
    but the last `behind` of them."""
    state = drafted(state_of(length, ATTENTION), length - behind, layout)
    assert state.draft is not None
    known = before.draft.length if before and before.draft else 0
    least = first_new_of_draft(before, state.draft, state.tokens, state.spans, known)
    since = first_new(before, state.tokens, state.spans, before.length if before else 0)
    state = drafted(state_of(length, ATTENTION, since=since), length - behind, layout, since=least)
    state = trimmed(state, before, before.length if before else 0, known)
    written = write_state(store, state, before, before.length if before else 0, RAW, draft_untouched=known)
    return Manifest.decode(manifest_of(state, written).encode())


# --- what is written, and read ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [TOKENS, WINDOWS, POINTS, DRAFTED, ATTENTION, FOUR_KINDS])
@pytest.mark.parametrize(("length", "behind"), [(1, 0), (255, 1), (256, 0), (257, 1), (700, 0), (700, 300)])
def test_a_draft_of_every_kind_comes_back_as_it_was(layout: Layout, length: int, behind: int) -> None:
    store, state = CountingStore(), drafted(state_of(length), max(1, length - behind), layout)
    manifest = saved(store, state)
    found = read_state(store, manifest)
    expect_rows(found, length)
    expect_draft(found, max(1, length - behind), layout)
    assert {ref.blob for ref in manifest.blobs()} == store.blobs()


def test_a_state_without_a_draft_is_stored_as_it_always_was() -> None:
    """The golden files show the same byte for byte."""
    store, state = CountingStore(), state_of(700)
    manifest = saved(store, state)
    assert manifest.features == ()
    record = record_of(manifest.encode())
    assert "draft" not in record
    assert record["features"] == []
    assert read_state(store, manifest).draft is None


def test_a_drafter_that_knows_nothing_has_no_draft() -> None:
    state = drafted(state_of(700), 0)
    assert saved(CountingStore(), state) == saved(CountingStore(), state_of(700))


def test_a_reader_that_knows_no_drafts_refuses_the_manifest_by_the_feature() -> None:
    data = saved(CountingStore(), drafted(state_of(20))).encode()
    with (
        mock.patch("serialization.manifest.FEATURES", frozenset()),
        pytest.raises(UnknownFeature, match="draft"),
    ):
        Manifest.decode(data)


def test_rows_that_target_and_drafter_share_are_stored_once() -> None:
    store, state = CountingStore(), state_of(700, ATTENTION)
    alone = saved(store, state)
    both = saved(store, drafted(state, layout=ATTENTION, seed=0))
    assert {ref.blob for ref in both.blobs()} == {ref.blob for ref in alone.blobs()} == store.blobs()


# --- one turn after another -------------------------------------------------------------------------------


def test_a_turn_writes_the_new_rows_of_the_draft_alone() -> None:
    store = CountingStore()
    first = next_turn(store, 4000, None, TOKENS)
    num_puts, known = store.num_puts, store.blobs()
    second = next_turn(store, 4050, first, TOKENS)
    assert first.draft is not None
    assert second.draft is not None
    assert (
        store.num_puts - num_puts == len(store.blobs() - known) == 2
    )  # one of the target's, one of the draft's
    assert second.draft.chunks[:-1] == first.draft.chunks
    assert (second.draft.chunks[-1].start, second.draft.chunks[-1].stop) == (4000, 4050)
    expect_draft(read_state(store, second), 4050, TOKENS)


def test_pieces_of_the_draft_alone_are_named_too() -> None:
    """It lags behind, so that it is still in a run that its target has filled."""
    store = CountingStore()
    manifest = next_turn(store, 200, None, TOKENS, behind=100)
    manifest = next_turn(store, 256, manifest, TOKENS, behind=50)
    assert manifest.draft is not None
    assert [(chunk.start, chunk.stop) for chunk in manifest.chunks] == [(0, 256)]
    assert [(chunk.start, chunk.stop) for chunk in manifest.draft.chunks] == [(0, 100), (100, 206)]
    assert manifest.features == ("draft", "pieces")


def test_a_draft_that_has_not_grown_is_not_written_again() -> None:
    store = CountingStore()
    first = next_turn(store, 700, None, DRAFTED)
    num_puts = store.num_puts
    assert next_turn(store, 700, first, DRAFTED).draft == first.draft
    assert store.num_puts == num_puts


@given(
    turns=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 60)), min_size=1, max_size=4),
    layout=st.sampled_from([TOKENS, WINDOWS, POINTS, DRAFTED]),
)
@settings(max_examples=40, deadline=None)
def test_every_turn_has_its_draft_and_can_go_back_to_those_before(
    turns: list[tuple[int, int]], layout: Layout
) -> None:
    store, manifest, ends, length = CountingStore(), None, [], 0
    for more, behind in turns:
        length += more
        behind = min(behind, length - 1, more - 1)  # what a drafter has read it does not forget
        manifest = next_turn(store, length, manifest, layout, behind)
        ends.append(length - behind)
        expect_draft(read_state(store, manifest, workers=1), ends[-1], layout)
    assert manifest is not None
    for end in ends:
        expect_draft(read_state(store, manifest, end, workers=1), end, layout)


def test_rows_that_the_drafter_made_anew_are_written_anew() -> None:
    store = CountingStore()
    first = saved(store, drafted(state_of(700, ATTENTION), layout=TOKENS))
    again = drafted(state_of(700, ATTENTION), layout=TOKENS, seed=10)
    assert again.draft is not None
    for untouched, since in ((700, 700), (699, 512), (300, 256), (255, 0)):
        assert first_new_of_draft(first, again.draft, again.tokens, again.spans, untouched) == since
    written = write_state(store, again, first, 700, RAW, draft_untouched=300)
    assert written.draft is not None
    assert first.draft is not None
    assert written.draft.chunks[0] == first.draft.chunks[0]
    assert not {*written.draft.chunks[1:]} & {*first.draft.chunks}


def test_rows_of_another_drafter_or_other_tokens_are_not_kept() -> None:
    store = CountingStore()
    first = saved(store, drafted(state_of(700, ATTENTION), layout=TOKENS))
    state = drafted(state_of(700, ATTENTION), layout=TOKENS)
    assert state.draft is not None
    other = replace(state.draft, fingerprint=Fingerprint({"model": "b3-22"}))
    wider = replace(state.draft, layout=ATTENTION)
    text = (*state.tokens[:400], 1, *state.tokens[401:])
    assert first_new_of_draft(first, state.draft, state.tokens, state.spans, 700) == 700
    assert first_new_of_draft(first, other, state.tokens, state.spans, 700) == 0
    assert first_new_of_draft(first, wider, state.tokens, state.spans, 700) == 0
    assert first_new_of_draft(first, state.draft, text, state.spans, 700) == 256
    assert first_new_of_draft(None, state.draft, state.tokens, state.spans, 700) == 0


def test_another_build_of_the_same_drafter_keeps_its_rows() -> None:
    state = drafted(state_of(700, ATTENTION), layout=TOKENS)
    first = saved(CountingStore(), state)
    assert state.draft is not None
    newer = replace(state.draft, fingerprint=Fingerprint(state.draft.fingerprint.meaning, {"torch": "9"}))
    assert first_new_of_draft(first, newer, state.tokens, state.spans, 700) == 700


@pytest.mark.parametrize(
    ("layout", "same", "left"),
    [(TOKENS, 700, 600), (TOKENS, 100, 100), (DRAFTED, 700, 600), (DRAFTED, 599, None), (TOKENS, 0, None)],
)
def test_a_save_without_a_drafter_keeps_the_draft_of_the_tokens_that_are_the_same(
    layout: Layout, same: int, left: int | None
) -> None:
    store, before = CountingStore(), drafted(state_of(700, ATTENTION), 600, layout)
    first = saved(store, before)
    after = state_of(900, ATTENTION)
    after = replace(after, tokens=(*after.tokens[:same], 1 + after.tokens[same], *after.tokens[same + 1 :]))
    num_puts = store.num_puts
    manifest = manifest_of(after, write_state(store, after, first, same, RAW))
    assert store.num_puts - num_puts == len(manifest.chunks) - min(same, 512) // 256, "no blob of the draft"
    if left is None:
        assert manifest.draft is None
    else:
        expect_draft(read_state(store, Manifest.decode(manifest.encode())), left, layout)


def test_a_save_keeps_the_window_of_a_draft_and_those_of_turns_before() -> None:
    store, turns = CountingStore(), [300, 500, 1300]
    manifest = None
    for length in turns:
        manifest = next_turn(store, length, manifest, WINDOWS)
    assert manifest is not None
    assert manifest.draft is not None
    stored = sum(
        chunk.stop - blob.start for chunk in manifest.draft.chunks if (blob := chunk.blob(PartKind.WINDOW))
    )
    assert stored <= 3 * 41 + 256
    for length in turns:
        expect_draft(read_state(store, manifest, length), length, WINDOWS)


def test_of_a_drafters_checkpoints_the_one_at_its_end_is_put() -> None:
    store, state = CountingStore(), drafted(state_of(220, ATTENTION), layout=POINTS)
    assert state.draft is not None
    (last,) = state.draft.points
    many = tuple(replace(last, position=position) for position in (10, 100, 219, 220))
    manifest = saved(store, replace(state, draft=replace(state.draft, points=many)))
    assert manifest.draft is not None
    assert [each.position for each in manifest.draft.checkpoints] == [220]


def test_checkpoints_of_a_draft_have_a_budget_of_their_own() -> None:
    store, manifest = CountingStore(), None
    for length in (100, 130, 160, 190):
        state = drafted(state_of(length), layout=POINTS)
        written = write_state(
            store, state, manifest, length, RAW, point_budget=3 * 20, draft_untouched=length
        )
        manifest = manifest_of(state, written)
    assert manifest is not None
    assert manifest.draft is not None
    assert [each.position for each in manifest.draft.checkpoints] == [100, 160, 190]
    assert [each.position for each in manifest.checkpoints] == [190]


# --- cut --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "at", "left"),
    [(TOKENS, 650, 600), (TOKENS, 600, 600), (TOKENS, 257, 257), (DRAFTED, 650, 600), (DRAFTED, 599, None)],
)
def test_a_cut_manifest_has_the_draft_of_what_is_left(layout: Layout, at: int, left: int | None) -> None:
    store = CountingStore()
    manifest = saved(store, drafted(state_of(700, WINDOWED), 600, layout))
    shorter = Manifest.decode(cut(manifest, at).encode())
    assert {ref.blob for ref in shorter.blobs()} <= {ref.blob for ref in manifest.blobs()}
    for found in (read_state(store, shorter), read_state(store, manifest, at)):
        if left is None:
            assert found.draft is None
        else:
            expect_draft(found, left, layout)
    assert draft_within(manifest.draft, 0) is None
    assert cut(manifest, 0).draft is None


@pytest.mark.parametrize(("at", "left"), [(700, 600), (602, 600), (601, 599), (257, 255), (3, 1), (2, None)])
def test_a_draft_that_looks_ahead_is_cut_so_much_before(at: int, left: int | None) -> None:
    store = CountingStore()
    manifest = saved(store, drafted(state_of(700, ATTENTION), 600, TOKENS, ahead=2))
    found = read_state(store, Manifest.decode(cut(manifest, at).encode())).draft
    assert (found and found.length) == left
    assert found is None or (found.ahead, found.reach) == (2, found.length + 2)


def test_what_follows_a_chunk_is_part_of_it_where_a_draft_looks_ahead() -> None:
    state = drafted(state_of(700, ATTENTION), 690, DRAFTED, ahead=2)
    assert state.draft is not None
    first = saved(CountingStore(), state)
    for untouched, since in ((692, 690), (691, 512), (514, 512), (513, 256)):
        assert first_new_of_draft(first, state.draft, state.tokens, state.spans, untouched) == since
    for changed, since in ((692, 690), (691, 512), (514, 512), (513, 256)):
        text = (*state.tokens[:changed], 1, *state.tokens[changed + 1 :])
        assert first_new_of_draft(first, state.draft, text, state.spans, 692) == since
        other = replace(state_of(700, ATTENTION), tokens=text)
        left = write_state(CountingStore(), other, first, changed).draft
        assert (left.length if left else 0) == (690 if changed == 692 else 0), "no checkpoint is true of it"
    assert first_new_of_draft(first, replace(state.draft, ahead=1), state.tokens, state.spans, 692) == 0


def test_checkpoints_of_a_draft_that_looks_ahead_are_kept_while_what_they_saw_is_the_same() -> None:
    store, before = CountingStore(), drafted(state_of(100), 98, POINTS, ahead=2)
    first = saved(store, before)
    longer = drafted(state_of(200), 198, POINTS, ahead=2)
    for changed, kept in ((100, [98, 198]), (99, [198])):
        text = (*longer.tokens[:changed], 1, *longer.tokens[changed + 1 :])
        draft = write_state(store, replace(longer, tokens=text), first, changed, draft_untouched=100).draft
        assert draft is not None
        assert [each.position for each in draft.checkpoints] == kept


# --- moved ------------------------------------------------------------------------------------------------


def test_a_draft_goes_with_its_session_into_an_archive() -> None:
    store, out, other = CountingStore(), io.BytesIO(), CountingStore()
    manifest = saved(store, drafted(state_of(600), 590))
    write_archive(out, manifest, store)
    assert read_archive(io.BytesIO(out.getvalue()), other) == manifest
    assert other.blobs() == store.blobs()
    expect_draft(read_state(other, manifest), 590)

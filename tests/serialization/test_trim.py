"""A save writes the window rows that are needed, and keeps what was stored before; nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.state import PartKind
from serialization.manifest import Manifest
from serialization.pipelines import RAW
from serialization.resume import can_resume_at, first_new
from serialization.snapshot import read_state, write_state
from serialization.trim import trimmed
from tests.serialization.states import WINDOWED, CountingStore, expect_rows, manifest_of, state_of

WINDOW = 300  # the longest of WINDOWED


def save(store: CountingStore, length: int, before: Manifest | None) -> Manifest:
    """The next turn of a conversation, at `length` tokens."""
    synced = before.length if before else 0
    whole = state_of(length, WINDOWED)
    state = state_of(length, WINDOWED, since=first_new(before, whole.tokens, whole.spans, synced))
    return manifest_of(state, write_state(store, trimmed(state, before, synced), before, synced, RAW))


def stored_window_rows(manifest: Manifest) -> int:
    blobs = ((chunk, chunk.blob(PartKind.WINDOW)) for chunk in manifest.chunks)
    return sum(chunk.stop - blob.start for chunk, blob in blobs if blob is not None)


def test_a_first_save_has_the_window_and_one_row_more() -> None:
    manifest = save(CountingStore(), 2000, None)
    assert stored_window_rows(manifest) == WINDOW + 1
    assert not can_resume_at(manifest, 1998)
    assert can_resume_at(manifest, 1999)


def test_all_rows_of_a_short_conversation_are_stored() -> None:
    manifest = save(CountingStore(), 200, None)
    assert stored_window_rows(manifest) == 200


@given(st.lists(st.integers(1, 700), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_every_turn_that_was_saved_can_be_gone_back_to(turns: list[int]) -> None:
    store, manifest, lengths = CountingStore(), None, []
    for turn in turns:
        lengths.append((lengths[-1] if lengths else 0) + turn)
        manifest = save(store, lengths[-1], manifest)
    assert manifest is not None
    for length in lengths:
        assert can_resume_at(manifest, length)
        expect_rows(read_state(store, manifest, length, workers=1), length)
    chunk = 256
    assert stored_window_rows(manifest) <= sum(min(WINDOW + 1, length) + chunk for length in lengths)

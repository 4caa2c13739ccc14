"""Damage to a draft's blobs, or to what a manifest says of it, is found before anything is believed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import BlobMissing, Corrupt, LimitExceeded, StateError, UnknownFeature
from engine.state import PartKind, PartSpec, SequenceState, parts_of
from serialization.canonical import pack
from serialization.manifest import Manifest
from serialization.pipelines import RAW
from serialization.snapshot import missing_blobs, read_state, write_state
from tests.serialization.spelling import map_of, record_of, written, written_as_1
from tests.serialization.states import (
    ATTENTION,
    DRAFTED,
    CountingStore,
    drafted,
    expect_draft,
    expect_rows,
    manifest_of,
    state_of,
)
from tests.serialization.test_manifest import mutated

TOKENS = parts_of(DRAFTED, PartKind.TOKEN)
WINDOWS = parts_of(DRAFTED, PartKind.WINDOW)
POINTS = parts_of(DRAFTED, PartKind.POINT)


def saved(store: CountingStore, state: SequenceState) -> Manifest:
    return Manifest.decode(manifest_of(state, write_state(store, state, None, 0, RAW)).encode())


# --- damage -----------------------------------------------------------------------------------------------


def small() -> SequenceState:
    return drafted(state_of(9, ATTENTION), 8)


def test_any_changed_byte_of_a_drafts_blobs_is_refused_and_so_is_any_cut() -> None:
    store = CountingStore()
    manifest = saved(store, small())
    assert manifest.draft is not None
    for ref in manifest.draft.refs():
        good = store.get(ref.blob)
        faults = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(len(good))]
        faults += [good[:end] for end in range(len(good))] + [good + b"\0"]
        for fault in faults:
            store.faults = {ref.blob: fault}
            with pytest.raises(Corrupt):
                read_state(store, manifest, workers=1)
        store.faults = {}
        assert store.delete_blob(ref.blob, 0)
        assert missing_blobs(store, manifest) == (ref.blob,)
        with pytest.raises(BlobMissing):
            read_state(store, manifest)
        saved(store, small())
    expect_draft(read_state(store, manifest), 8)


def test_the_target_is_read_without_a_draft_that_is_damaged() -> None:
    store = CountingStore()
    manifest = saved(store, small())
    assert manifest.draft is not None
    store.faults = {ref.blob: b"" for ref in manifest.draft.refs()}
    expect_rows(read_state(store, replace(manifest, draft=None)), 9)


def test_any_changed_byte_of_the_manifests_draft_is_refused_or_another_manifest() -> None:
    manifest = saved(CountingStore(), small())
    assert manifest.draft is not None
    data, section = written_as_1(record_of(manifest.encode())), pack(manifest.draft.record())
    start = data.index(section)
    for at in range(start, start + len(section)):
        for bit in range(8):
            other = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with suppress(StateError):
                found = Manifest.decode(other)
                assert map_of(found.encode()) == map_of(other)
                assert found != manifest


@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_draft_is_accepted_is_what_would_be_written(data: st.DataObject) -> None:
    encoded = changed()
    record = record_of(encoded)
    record["draft"] = data.draw(mutated(record["draft"]))
    encoded = written(record)
    with suppress(StateError):
        assert Manifest.decode(encoded).encode() == encoded


def changed(**changes: object) -> bytes:
    """The bytes of a good manifest with other values in its draft; ... takes a key away."""
    data = saved(CountingStore(), drafted(state_of(300, ATTENTION), 290)).encode()
    record = record_of(data)
    draft = {**record["draft"], **changes}
    record["draft"] = {key: value for key, value in draft.items() if value is not ...}
    return written(record)


ROWS = "rows-b3-" + "0" * 64
POINT = "point-b3-" + "0" * 64
PART: list[Any] = ["k", "token", 0, "f32", [4], 1, None]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"length": 0}, Corrupt),
        ({"length": 301}, Corrupt),
        ({"length": 300}, Corrupt),  # its chunks cover fewer
        ({"length": 0, "chunks": [], "checkpoints": []}, Corrupt),
        ({"length": 301, "chunks": [[0, 256, []], [256, 512, []]]}, Corrupt),  # of 300 tokens
        ({"length": -1}, Corrupt),
        ({"ahead": 11}, Corrupt),
        ({"ahead": -1}, Corrupt),
        ({"ahead": 2**24 + 1}, LimitExceeded),
        ({"ahead": ...}, Corrupt),
        ({"length": 2**24 + 1}, LimitExceeded),
        ({"length": ...}, Corrupt),
        ({"extra": 1}, Corrupt),
        ({"chunks": []}, Corrupt),
        ({"chunks": [[0, 256, []]]}, Corrupt),
        ({"chunks": [[0, 256, []], [256, 512, []], [512, 768, []]]}, Corrupt),
        ({"chunks": [[0, 256, [["token", ROWS, 0, 2**40, 1]]], [256, 290, []]]}, LimitExceeded),
        ({"chunks": [[0, 256, [["token", POINT, 0, 1, 1]]], [256, 290, []]]}, Corrupt),
        ({"chunks": [[0, 256, []]] * (2**16 + 1)}, LimitExceeded),
        ({"checkpoints": [[290, None]]}, Corrupt),
        ({"checkpoints": [[291, [POINT, 1, 1]]]}, Corrupt),
        ({"checkpoints": [[290, [ROWS, 1, 1]]]}, Corrupt),
        ({"layout": [[*PART[:4], [2**20, 2**20], *PART[5:]]]}, LimitExceeded),
        ({"layout": [[*PART[:4], [2**40], *PART[5:]]]}, LimitExceeded),
        ({"layout": [PART] * (2**14 + 1)}, LimitExceeded),
        ({"layout": [[*PART[:3], "f64", *PART[4:]]]}, UnknownFeature),
        ({"layout": [["k", "window", 0, "f32", [4], 1, 2**40]]}, LimitExceeded),
        ({"fingerprint": {"making": {}}}, Corrupt),
        ({"fingerprint": {"making": {}, "meaning": {str(at): at for at in range(257)}}}, LimitExceeded),
    ],
)
def test_each_wrong_value_of_a_draft_is_refused_by_its_own_error(
    changes: dict[str, object], error: type[StateError]
) -> None:
    assert Manifest.decode(changed()).draft is not None
    with pytest.raises(error) as caught:
        Manifest.decode(changed(**changes))
    assert type(caught.value) is error


@pytest.mark.parametrize("features", [[], ["draft", "draft"], ["draft", "time-travel"], "draft", None])
def test_a_draft_without_its_feature_is_refused(features: object) -> None:
    data = changed()
    with pytest.raises(StateError):
        Manifest.decode(written({**record_of(data), "features": features}))


def test_the_feature_without_a_draft_is_refused() -> None:
    data = changed()
    for draft in (..., None, [], 3):
        with pytest.raises(Corrupt):
            Manifest.decode(written({**record_of(data), "draft": draft}))


def test_declared_sizes_of_a_draft_are_compared_before_a_blob_of_it_is_fetched() -> None:
    """A layout that makes absurd rows of the chunks has other sizes than they."""
    store = CountingStore()
    manifest = saved(store, drafted(state_of(100, ATTENTION), layout=TOKENS))
    assert manifest.draft is not None
    wide = (PartSpec("k", PartKind.TOKEN, 0, "f32", (2**26,)),)
    own = {ref.blob for ref in manifest.draft.refs()}
    store.got.clear()
    with pytest.raises(Corrupt):
        read_state(store, replace(manifest, draft=replace(manifest.draft, layout=wide)))
    assert not own & set(store.got)


def test_a_draft_of_more_tokens_than_there_are_is_not_written() -> None:
    store = CountingStore()
    with pytest.raises(Corrupt):
        write_state(store, drafted(state_of(20), 21), None, 0)
    with pytest.raises(Corrupt):
        write_state(store, drafted(state_of(20), 19, ahead=2), None, 0)
    assert store.num_puts == 0


def test_a_draft_that_lacks_rows_is_not_written() -> None:
    with pytest.raises(Corrupt):
        write_state(CountingStore(), drafted(state_of(700), since=300), None, 0)

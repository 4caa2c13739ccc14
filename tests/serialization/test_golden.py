"""What format 1 ever wrote is read for ever. The files were written once, by tests/golden/make.py."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from engine.state import PartKind, parts_of
from serialization.archive import read_archive
from serialization.chunks import decode_rows, read_header
from serialization.manifest import Manifest
from serialization.points import decode_logits, decode_point
from serialization.replies import KeptReply
from serialization.snapshot import read_state
from tests.golden.make import LAYOUT, NUM_ROWS
from tests.serialization.states import (
    FOUR_KINDS,
    CountingStore,
    expect_draft,
    expect_rows,
    tokens_of,
)

FOLDER = Path(__file__).parents[1] / "golden" / "format-1"
INDEX: dict[str, dict[str, str]] = json.loads((FOLDER / "index.json").read_text())


def golden(name: str) -> bytes:
    data = (FOLDER / name).read_bytes()
    assert blake3(data).hexdigest() == INDEX[name]["file"], "a golden file must never change"
    return data


def test_every_golden_file_is_in_the_index() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*INDEX, "index.json"}
    for name in INDEX:
        golden(name)


@pytest.mark.parametrize("name", ["chunk-raw.blob", "chunk-fast.blob", "chunk-default.blob"])
def test_rows_of_every_codec_and_dtype_are_read(name: str) -> None:
    rows = decode_rows(golden(name), PartKind.TOKEN, LAYOUT, 0, NUM_ROWS)
    decoded = b"".join(part.numpy().tobytes() for part in rows.parts)
    assert blake3(decoded).hexdigest() == INDEX[name]["decoded"]
    pipelines = [section.pipeline for section in read_header(golden(name)).sections]
    assert all(pipelines) or name == "chunk-raw.blob", "every dtype's codec is to be in it"


def test_point_state_and_logits_are_read() -> None:
    point = decode_point(golden("point.blob"), parts_of(FOUR_KINDS, PartKind.POINT), 9)
    decoded = b"".join(part.numpy().tobytes() for part in point.parts)
    assert blake3(decoded).hexdigest() == INDEX["point.blob"]["decoded"]
    logits = decode_logits(golden("logits.blob"), 9, 99)
    assert blake3(logits.numpy().tobytes()).hexdigest() == INDEX["logits.blob"]["decoded"]


@pytest.mark.parametrize("name", ["session", "session-draft"])
def test_a_session_is_read_from_its_manifest_and_its_archive(name: str) -> None:
    store = CountingStore()
    manifest = read_archive(io.BytesIO(golden(f"{name}.tenuto")), store)
    assert Manifest.decode(golden(f"{name}.manifest")) == manifest
    assert manifest.encode() == golden(f"{name}.manifest")
    state = read_state(store, manifest)
    assert state.tokens == tokens_of(20)
    expect_rows(state, 20)
    if manifest.features:
        expect_draft(state, 18)
    else:
        assert state.draft is None


def test_what_is_written_today_without_a_draft_is_what_was_written_before_there_were_any() -> None:
    manifest = Manifest.decode(golden("session.manifest"))
    assert manifest.encode() == golden("session.manifest")
    assert b"draft" not in golden("session.manifest")
    with_one = Manifest.decode(golden("session-draft.manifest"))
    assert replace(with_one, draft=None).encode() == golden("session.manifest")


def test_a_note_changes_nothing_of_the_session_that_has_it() -> None:
    noted = Manifest.decode(golden("session-note.manifest"))
    assert noted.note == "what else belongs to it"
    assert replace(noted, note=None).encode() == golden("session.manifest")
    assert b"note" not in golden("session.manifest")


def test_a_salt_changes_nothing_else_of_the_session_that_has_it() -> None:
    salted = Manifest.decode(golden("session-salt.manifest"))
    assert salted.salt == "b3-" + "0123456789abcdef" * 4
    assert salted.encode() == golden("session-salt.manifest")
    assert replace(salted, salt=None).encode() == golden("session.manifest")
    assert b"salt" not in golden("session.manifest")


def test_replies_that_may_be_asked_for_again_are_read_as_they_were_written() -> None:
    replied = Manifest.decode(golden("session-replies.manifest"))
    assert replied.replies == (KeptReply(bytes(range(16)), bytes(range(16, 32)), 3, 1, "eos"),)
    assert replied.encode() == golden("session-replies.manifest")
    plain = Manifest.decode(golden("session.manifest"))
    assert replace(replied, replies=(), messages=plain.messages) == plain

"""What any version of the format ever wrote is read for ever. The files were written once, by
tests/golden/make.py."""

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
from serialization.manifest import FEATURES, Manifest
from serialization.migrate.step import Step
from serialization.migrate.steps import STEPS, manifest_version, taken
from serialization.points import decode_logits, decode_point
from serialization.prefix import VERSIONS, Letter
from serialization.replies import KeptReply
from serialization.snapshot import read_state
from tests.golden.make import LAYOUT, LOSSES, NUM_ROWS
from tests.serialization.spelling import map_of, record_of
from tests.serialization.states import (
    FOUR_KINDS,
    CountingStore,
    expect_draft,
    expect_rows,
    tokens_of,
)

FOLDER = Path(__file__).parents[1] / "golden"
NEWEST = VERSIONS[Letter.MANIFEST]
EVERY = range(1, NEWEST + 1)


def index(version: int) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((FOLDER / f"format-{version}" / "index.json").read_text())
    return found


def golden(name: str, version: int = 1) -> bytes:
    data = (FOLDER / f"format-{version}" / name).read_bytes()
    assert blake3(data).hexdigest() == index(version)[name]["file"], "a golden file must never change"
    return data


def manifests(version: int) -> list[str]:
    return [name for name in index(version) if name.endswith(".manifest")]


@pytest.mark.parametrize("version", EVERY)
def test_every_golden_file_is_in_the_index(version: int) -> None:
    folder = FOLDER / f"format-{version}"
    assert {path.name for path in folder.iterdir()} == {*index(version), "index.json"}
    for name in index(version):
        golden(name, version)


@pytest.mark.parametrize(
    "name", ["chunk-raw.blob", "chunk-fast.blob", "chunk-default.blob", "chunk-level-19.blob"]
)
def test_rows_of_every_codec_and_dtype_are_read(name: str) -> None:
    rows = decode_rows(golden(name), PartKind.TOKEN, LAYOUT, 0, NUM_ROWS)
    decoded = b"".join(part.numpy().tobytes() for part in rows.parts)
    assert blake3(decoded).hexdigest() == index(1)[name]["decoded"]
    pipelines = [section.pipeline for section in read_header(golden(name)).sections]
    assert all(pipelines) or name == "chunk-raw.blob", "every dtype's codec is to be in it"


def test_point_state_and_logits_are_read() -> None:
    point = decode_point(golden("point.blob"), parts_of(FOUR_KINDS, PartKind.POINT), 9)
    decoded = b"".join(part.numpy().tobytes() for part in point.parts)
    assert blake3(decoded).hexdigest() == index(1)["point.blob"]["decoded"]
    logits = decode_logits(golden("logits.blob"), 9, 99)
    assert blake3(logits.numpy().tobytes()).hexdigest() == index(1)["logits.blob"]["decoded"]


@pytest.mark.parametrize("version", EVERY)
@pytest.mark.parametrize("name", ["session", "session-draft"])
def test_a_session_is_read_from_its_manifest_and_its_archive(name: str, version: int) -> None:
    store = CountingStore()
    manifest = read_archive(io.BytesIO(golden(f"{name}.tenuto", version)), store)
    assert Manifest.decode(golden(f"{name}.manifest", version)) == manifest
    state = read_state(store, manifest)
    assert state.tokens == tokens_of(20)
    expect_rows(state, 20)
    if manifest.features:
        expect_draft(state, 18)
    else:
        assert state.draft is None


@pytest.mark.parametrize("version", EVERY)
def test_a_golden_manifest_is_of_its_version_and_what_is_written_of_it_is_of_the_newest(version: int) -> None:
    for name in manifests(version):
        data = golden(name, version)
        assert manifest_version(data) == version
        again = Manifest.decode(data).encode()
        assert manifest_version(again) == NEWEST
        assert Manifest.decode(again) == Manifest.decode(data)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_turns_what_its_version_wrote_into_what_the_next_one_wrote(step: Step) -> None:
    """So that a step which is changed after its version was released breaks a test."""
    since = step.since
    assert set(manifests(since)) <= set(manifests(since + 1))
    for name in manifests(since):
        before, after = record_of(golden(name, since)), record_of(golden(name, since + 1))
        assert taken(before, STEPS[since - 1 : since]) == after


def test_every_feature_has_a_golden_file_of_the_newest_version() -> None:
    found = {feature for name in manifests(NEWEST) for feature in record_of(golden(name, NEWEST))["features"]}
    assert found == FEATURES


def test_a_map_has_one_spelling_whoever_packed_it() -> None:
    for version in EVERY:
        for name in manifests(version):
            assert map_of(Manifest.decode(golden(name, version)).encode()) == map_of(golden(name, NEWEST))


@pytest.mark.parametrize("version", EVERY)
def test_what_has_no_draft_says_nothing_of_drafts(version: int) -> None:
    plain, with_one = golden("session.manifest", version), golden("session-draft.manifest", version)
    assert "draft" not in record_of(plain)
    assert replace(Manifest.decode(with_one), draft=None) == Manifest.decode(plain)


@pytest.mark.parametrize("version", EVERY)
def test_a_note_changes_nothing_of_the_session_that_has_it(version: int) -> None:
    noted, plain = golden("session-note.manifest", version), golden("session.manifest", version)
    assert Manifest.decode(noted).note == "what else belongs to it"
    assert "note" not in record_of(plain)
    assert replace(Manifest.decode(noted), note=None) == Manifest.decode(plain)


@pytest.mark.parametrize("version", EVERY)
def test_a_salt_changes_nothing_else_of_the_session_that_has_it(version: int) -> None:
    salted, plain = golden("session-salt.manifest", version), golden("session.manifest", version)
    assert Manifest.decode(salted).salt == "b3-" + "0123456789abcdef" * 4
    assert "salt" not in record_of(plain)
    assert replace(Manifest.decode(salted), salt=None) == Manifest.decode(plain)


@pytest.mark.parametrize("version", EVERY)
def test_replies_that_may_be_asked_for_again_are_read_as_they_were_written(version: int) -> None:
    replied = Manifest.decode(golden("session-replies.manifest", version))
    assert replied.replies == (KeptReply(bytes(range(16)), bytes(range(16, 32)), 3, 1, "eos"),)
    plain = Manifest.decode(golden("session.manifest", version))
    assert replace(replied, replies=(), messages=plain.messages) == plain


def test_what_conversions_have_cost_is_read_as_it_was_stated() -> None:
    converted = Manifest.decode(golden("session-reencoded.manifest", NEWEST))
    assert converted.reencoded == LOSSES
    assert [loss.is_exact for loss in converted.reencoded] == [True, False]
    plain = Manifest.decode(golden("session.manifest", NEWEST))
    assert replace(converted, reencoded=(), spans=plain.spans) == plain


def test_a_session_in_chunks_of_another_size_is_read() -> None:
    store = CountingStore()
    manifest = read_archive(io.BytesIO(golden("session-chunks.tenuto", NEWEST)), store)
    assert Manifest.decode(golden("session-chunks.manifest", NEWEST)) == manifest
    assert [chunk.stop for chunk in manifest.chunks] == [64, 128, 150]
    state = read_state(store, manifest)
    expect_rows(state, 150)
    expect_draft(state, 150)

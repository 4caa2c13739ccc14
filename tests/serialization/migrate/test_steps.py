"""Laws of the steps: a list that only grows, and any version read by the steps that follow it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from engine.errors import Corrupt, StateError, UnknownFeature, UnknownVersion
from serialization.archive import read_archive
from serialization.canonical import pack
from serialization.manifest import Manifest
from serialization.migrate import steps
from serialization.migrate.step import Step
from serialization.migrate.steps import STEPS, manifest_version, taken
from serialization.prefix import VERSIONS, Letter
from tests.serialization.spelling import OLD, record_of, written, written_as_1
from tests.serialization.states import EMPTY, CountingStore

#: (version, name) of every step there ever was. Append; whoever changes a line strands somebody's files.
RELEASED = [(1, "packed")]
ZEBRA = {**record_of(EMPTY.encode()), "features": ["zebra"], "stripes": True}


def test_the_list_of_steps_is_appended_to_and_never_changed() -> None:
    assert [(step.since, step.name) for step in STEPS] == RELEASED


def test_there_is_one_step_from_each_version_to_the_next() -> None:
    assert [step.since for step in STEPS] == list(range(1, VERSIONS[Letter.MANIFEST]))


def test_a_step_says_why_it_was_taken() -> None:
    assert all(len(step.why) > 20 for step in STEPS)


def renames(since: int, old: str, new: str) -> Step:
    def apply(values: dict[str, Any]) -> dict[str, Any]:
        return {new if key == old else key: value for key, value in values.items()}

    return Step(since, f"{old}-{new}", "a test", lambda body, what: {}, apply)


def test_steps_are_taken_in_order_and_each_takes_what_the_one_before_gave() -> None:
    chain = [renames(1, "a", "b"), renames(2, "b", "c"), renames(3, "x", "a")]
    assert taken({"a": 1, "x": 2}, chain) == {"c": 1, "a": 2}
    assert taken({"b": 1, "x": 2}, chain[1:]) == {"c": 1, "a": 2}
    assert taken({"a": 1}, []) == {"a": 1}


def test_what_every_version_wrote_is_read_and_what_is_written_is_of_the_newest() -> None:
    old, new = written_as_1(record_of(EMPTY.encode())), EMPTY.encode()
    assert (manifest_version(old), manifest_version(new)) == (1, 2)
    assert Manifest.decode(old) == Manifest.decode(new) == EMPTY
    assert Manifest.decode(old).encode() == new


def test_a_feature_that_is_not_known_is_refused_by_its_name() -> None:
    for data in (written_as_1(ZEBRA), written(ZEBRA)):
        with pytest.raises(UnknownFeature, match="zebra") as caught:
            Manifest.decode(data)
        assert caught.value.details["feature"] == "zebra"


def test_no_step_is_shown_a_map_whose_features_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may well break the rules that a step relies on."""
    asked = []
    watched = replace(STEPS[0], apply=lambda values: asked.append(values) or values)
    monkeypatch.setattr(steps, "STEPS", (watched,))
    with pytest.raises(UnknownFeature, match="zebra"):
        Manifest.decode(written_as_1(ZEBRA))
    assert asked == []
    Manifest.decode(written_as_1(record_of(EMPTY.encode())))
    assert len(asked) == 1


def test_a_version_that_is_not_known_is_refused_by_its_number() -> None:
    for version in (0, 3, 9):
        data = b"tenutoM" + bytes([version]) + EMPTY.encode()[8:]
        for reader in (Manifest.decode, manifest_version):
            with pytest.raises(UnknownVersion, match=f"version {version} ") as caught:
                reader(data)
            assert caught.value.details["version"] == version


def test_each_version_is_read_by_its_own_rules_alone() -> None:
    """A body of one under the number of the other is no manifest."""
    old, new = written_as_1(record_of(EMPTY.encode())), EMPTY.encode()
    for data in (new[:8] + old[8:], old[:8] + new[8:], OLD + pack([]), written([])):
        with pytest.raises(StateError):
            Manifest.decode(data)


@pytest.mark.parametrize("what", ["version", "feature"])
def test_an_archive_of_a_newer_one_is_refused_by_its_name_and_stores_nothing(what: str) -> None:
    newer = written(ZEBRA) if what == "feature" else b"tenutoM\x09" + bytes(99)
    head = b"tenutoA\x01M" + len(newer).to_bytes(8, "little") + blake3(newer).digest() + newer + b"E"
    store = CountingStore()
    with pytest.raises(UnknownFeature if what == "feature" else UnknownVersion, match=r"zebra|version 9"):
        read_archive(io.BytesIO(head + blake3(head).digest()), store)
    assert store.num_puts == 0


def test_an_old_manifest_keeps_every_rule_of_its_version() -> None:
    good = record_of(EMPTY.encode())
    for wrong in ({"note": "x"}, {"features": ["note"]}, {"title": 3}, {"extra": None}):
        with pytest.raises(Corrupt):
            Manifest.decode(written_as_1({**good, **wrong}))
    with pytest.raises(Corrupt, match="canonical"):
        Manifest.decode(OLD + pack(good).replace(b"\xde\x00\x18", b"\xdf\x00\x00\x00\x18", 1))

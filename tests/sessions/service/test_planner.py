"""The cheaper way is taken, by what was measured, and the reason says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.runner import Engine
from serialization.blobs import BlobId, Bytes
from serialization.buffers import NEW, Buffers
from serialization.manifest import Manifest
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Reason
from sessions.service.backend import Backend, BackendConfig
from sessions.service.planner import Planner, nbytes_of
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.service.hearing import SAMPLED, SHORT, T, heard, user

LONG = "much was said of this before. " * 20


@pytest.fixture
def manifest(engine: Engine) -> Manifest:
    chat = Conversation.new(SessionManager(MemoryStore(), engine))
    list(chat.say(LONG, Reply(max_tokens=4)))
    assert chat.session.manifest is not None
    return chat.session.manifest


def test_what_was_never_measured_is_restored(manifest: Manifest) -> None:
    planner = Planner()
    assert not planner.passes_over(planner.estimate(manifest))
    planner.computed(1000, 0.001)
    assert not planner.passes_over(planner.estimate(manifest))


def test_the_faster_way_is_taken_but_for_little_rows_are_not_written_anew(manifest: Manifest) -> None:
    for restore, recompute, passes in ((1.0, 0.1, True), (1.0, 0.9, False), (0.1, 1.0, False)):
        planner = Planner()
        planner.restored(nbytes_of(manifest), restore)
        planner.computed(manifest.length, recompute)
        estimate = planner.estimate(manifest)
        assert estimate.restore == pytest.approx(restore)
        assert estimate.recompute == pytest.approx(recompute)
        assert planner.passes_over(estimate) == passes


def test_one_that_was_slow_for_once_is_no_measure(manifest: Manifest) -> None:
    planner = Planner()
    for seconds in (0.1, 0.1, 9.0, 0.1, 0.1):
        planner.restored(nbytes_of(manifest), seconds)
    assert planner.estimate(manifest).restore == pytest.approx(0.1)


def test_a_way_that_is_never_taken_is_tried_again(manifest: Manifest) -> None:
    planner = Planner()
    planner.restored(nbytes_of(manifest), 5.0)
    planner.computed(manifest.length, 0.1)
    taken = [planner.passes_over(planner.estimate(manifest)) for _ in range(64)]
    assert 0 < taken.count(False) < 8


class SlowStore(DiskStore):
    """Reads of rows take their time."""

    seconds = 0.0

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes:
        if not blob.startswith("manifest"):
            time.sleep(self.seconds)
        return super().get(blob, buffers)


def test_a_store_that_is_slow_is_passed_over_and_told_of(make_engine: MakeEngine, tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "slow", T)
    config = BackendConfig(policy=Policy(lease=5, grace=10))
    one = Backend(make_engine(deterministic=True), lambda _: store, config)
    sessions = [one.create(T, sampler=SAMPLED).id for _ in range(3)]
    for number, session in enumerate(sessions):
        heard(one.turn(T, session, user(f"{number} {LONG}"), SHORT))
    two = Backend(make_engine(deterministic=True), lambda _: store, config)
    store.seconds = 1.0
    begun, _, _ = heard(two.turn(T, sessions[0], user("more"), SHORT))
    assert begun.restored.reason is Reason.EXACT
    two._common.planner.computed(1000, 0.1)
    begun, said, ended = heard(two.turn(T, sessions[1], user("more"), SHORT))
    assert begun.restored.reason is Reason.SLOWER
    assert begun.restored.recomputed > 500
    assert "would have taken" in begun.restored.detail
    assert ended.save_error is None
    store.seconds = 0.0
    view = two.get(T, sessions[1])
    three = Backend(make_engine(deterministic=True), lambda _: store, config)
    begun, _, _ = heard(three.turn(T, sessions[1], user("and more"), SHORT))
    assert (begun.restored.reason, begun.restored.restored) == (Reason.EXACT, view.length)
    assert view.messages[-1].text == said
    for backend in (one, two, three):
        backend.close()

"""Prompts get as much of a batch as replies can wait for."""

from __future__ import annotations

import pytest

from engine.pace import Pace
from engine.scheduler import Counts


def measured(pace: Pace, alone: float, each: float, replies: int = 4) -> Pace:
    """Batches of so many replies take `alone` seconds, and each token of a prompt adds `each`."""
    for _ in range(40):
        pace.add(Counts(0, replies), alone)
        pace.add(Counts(100, replies), alone + 100 * each)
    return pace


def test_without_replies_prompts_have_all_the_room() -> None:
    assert Pace().most(0) is None
    assert measured(Pace(), 0.01, 0.001).most(0) is None


def test_before_anything_was_measured_they_have_little() -> None:
    assert Pace(least=8).most(1) == 8
    assert Pace(least=8).most(40) == 40


def test_a_batch_with_prompts_takes_no_more_than_its_stretch() -> None:
    pace = measured(Pace(stretch=2.0, least=1), alone=0.05, each=0.001)
    assert pace.most(4) == pytest.approx(50, abs=2)
    assert measured(Pace(stretch=3.0, least=1), 0.05, 0.001).most(4) == pytest.approx(100, abs=3)


def test_prompts_never_stand_still() -> None:
    assert measured(Pace(least=8), alone=0.001, each=1.0).most(4) == 8


def test_batches_of_about_as_many_replies_are_measured_together() -> None:
    pace = measured(measured(Pace(least=1), 0.05, 0.001, replies=1), 0.5, 0.001, replies=64)
    assert pace.most(1) == pytest.approx(50, abs=2)
    assert pace.most(64) == pace.most(100) == pytest.approx(500, abs=10)


def test_speeds() -> None:
    pace = Pace()
    assert (pace.prefill_speed, pace.decode_speed) == (None, None)
    measured(pace, alone=0.02, each=0.001)
    assert pace.prefill_speed == pytest.approx(1000, rel=0.05)
    assert pace.decode_speed == pytest.approx(200, rel=0.05)

"""Laws of work that is done ahead: it gives the same as without, and as much of it is done as pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from serialization.ahead import Ahead


class Places:
    """Numbered ones. `made` is how many there are, `used` which of them have a job or its result now."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> list[int]:
        self.made += 1
        return []


def squares(
    items: range, workers: int = 4, work: Callable[[], None] = lambda: None
) -> tuple[Ahead[int, list[int], list[int]], Places]:
    """Of each item its square, written into its place."""

    def square(item: int, place: list[int]) -> list[int]:
        work()
        place[:] = [item * item]
        return place

    places = Places()
    return Ahead(square, items, workers, places), places


def sleep() -> None:
    time.sleep(0.01)


@pytest.mark.parametrize("work", [lambda: None, sleep], ids=["quick", "slow"])
@pytest.mark.parametrize("workers", [1, 4])
def test_results_are_those_of_the_items_that_are_asked_for(workers: int, work: Callable[[], None]) -> None:
    ahead, places = squares(range(40), workers, work)
    for order in (range(40), range(5), (7, 3, 3, 4, 39, 0, 1, 2, 3), range(20, 40)):
        for index in order:
            assert ahead.take(index) == [index * index]
    assert len({id(place) for place in ahead.close()}) == places.made <= workers + 2


def test_a_job_that_still_runs_for_nothing_has_its_place_to_itself() -> None:
    """Who takes the items jumps ahead, over those that are being worked at."""

    def slowly(item: int, place: list[int]) -> list[int]:
        for _ in range(40 if item == 9 else 2):
            time.sleep(0.005)
            place[:] = [item]
        return place

    ahead = Ahead(slowly, range(100), 4, list)
    for index in range(9):
        ahead.take(index)  # until four threads are at work, one of them for long
    for index in range(60, 70):
        result = ahead.take(index)
        time.sleep(0.02)
        assert result == [index]
    ahead.close()


def test_every_place_comes_back_also_of_jobs_that_were_not_taken() -> None:
    ahead, places = squares(range(40), work=sleep)
    ahead.take(0)
    assert len(ahead.close()) == places.made == 3


def test_no_place_is_had_twice_where_taking_is_broken_off() -> None:
    class Interrupted(list[object]):
        def append(self, place: object) -> None:
            super().append(place)
            raise KeyboardInterrupt

    ahead, _ = squares(range(9))
    ahead.take(0)
    ahead._free = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ahead.take(1)
    found = ahead.close()
    assert len({id(place) for place in found}) == len(found)


def test_a_result_is_good_until_the_next_one_is_taken() -> None:
    ahead, _ = squares(range(50))
    for index in range(50):
        result = ahead.take(index)
        time.sleep(0.0005)
        assert result == [index * index]
    ahead.close()


def test_the_error_of_a_job_is_told_to_who_takes_it_and_the_others_go_on() -> None:
    def inverse(item: int, place: object) -> float:
        return 1 / item

    ahead = Ahead(inverse, [1, 0, 4, 0, 2], 4, object)
    for index, expected in enumerate([1.0, None, 0.25, None, 0.5]):
        if expected is None:
            with pytest.raises(ZeroDivisionError):
                ahead.take(index)
        else:
            assert ahead.take(index) == expected
    assert len(ahead.close()) == 3


def test_one_thread_is_enough_where_jobs_work_however_long_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        ends = time.thread_time() + 0.004
        while time.thread_time() < ends:
            pass

    # What others take of the processor meanwhile is none of this.
    alone = SimpleNamespace(perf_counter=time.thread_time, thread_time=time.thread_time)
    monkeypatch.setattr("serialization.ahead.time", alone)
    ahead, places = squares(range(12), work=work)
    for index in range(12):
        ahead.take(index)
    assert places.made == 3
    ahead.close()


def test_more_threads_are_begun_where_jobs_sleep() -> None:
    ahead, places = squares(range(40), work=sleep)
    started = time.perf_counter()
    for index in range(40):
        ahead.take(index)
    assert time.perf_counter() - started < 40 * 0.01 / 1.5
    assert places.made == 6
    ahead.close()


def test_when_it_is_closed_no_job_runs_and_none_begins() -> None:
    before, begun = threading.active_count(), []

    def work() -> None:
        begun.append(1)
        time.sleep(0.01)

    ahead, _ = squares(range(40), work=work)
    for index in range(9):
        ahead.take(index)
    ahead.close()
    num_begun = len(begun)
    assert threading.active_count() == before
    time.sleep(0.03)
    assert len(begun) == num_begun

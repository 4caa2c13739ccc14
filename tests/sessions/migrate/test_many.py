"""More sessions take no more memory: what is known of them lies in a temporary file."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.many import fill, unsynced
from sessions.stores.disk import DiskStore
from tests.sessions.migrate.places import migration

#: More than are asked about at once, and twice as many.
FEW, MANY = 270, 540


@pytest.mark.timeout(200)
def test_more_sessions_take_no_more_memory(tmp_path: Path) -> None:
    peaks = {}
    for count in (8, FEW, MANY):  # what is made once only is there after the first
        with unsynced(), closing(DiskStore(tmp_path / f"from-{count}")) as source:
            fill(source, count)
            with closing(DiskStore(tmp_path / f"to-{count}")) as target:
                tracemalloc.start()
                try:
                    with migration(source, target, jobs=2) as moving:
                        moving.plan()
                        assert moving.run().num_sessions == count
                    peaks[count] = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
    assert peaks[MANY] < peaks[FEW] + 400_000  # the manifests of the rest are 2 MB decoded

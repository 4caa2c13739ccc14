"""Stores of many sessions: found as among few, and gone through in no more memory than few need."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.many import FINGERPRINT, fill, tokens_in, unsynced
from serialization.blobs import Store
from sessions.catalog import Catalog
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.prefix import PrefixIndex
from sessions.stores.open import open_store

FEW, MANY = 60, 600
POLICY = Policy(lease=0.001, grace=0.002, budget=1 << 40)


def opened(folder: Path, sealed: bool) -> Store:
    keyring = Keyring(folder / "keys", MasterKeys([b"m" * 32])) if sealed else None
    return open_store(str(folder / "store"), keyring=keyring)


@pytest.fixture(scope="module", params=["clear", "sealed"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A store of few sessions, and one of many."""
    made = {}
    for count in (FEW, MANY):
        made[count] = tmp_path_factory.mktemp(f"{request.param}{count}")
        with unsynced(), closing(opened(made[count], request.param == "sealed")) as store:
            fill(store, count)
    return made


def reopened(folder: Path) -> Store:
    return opened(folder, (folder / "keys").exists())


def test_each_of_many_is_found_by_its_past_its_id_its_start_and_its_name(folders: dict[int, Path]) -> None:
    with closing(reopened(folders[MANY])) as store:
        prefixes, catalog = PrefixIndex(store, "default"), Catalog(store)
        for number in (0, 1, 250, MANY - 1):
            hit = prefixes.find(FINGERPRINT, (*tokens_in(number), 1, 2, 3))
            assert hit is not None
            assert hit.manifest.name == f"n{number}"
            for ref in (hit.session, hit.session[:12].lower(), f"n{number}"):
                assert catalog.find(ref) == hit.session
        assert prefixes.find(FINGERPRINT, tokens_in(MANY)) is None


def test_all_are_listed_page_by_page_in_their_order(folders: dict[int, Path]) -> None:
    with closing(reopened(folders[MANY])) as store:
        manager, names, after = SessionManager(store), [], None
        while True:
            page = manager.page(70, after)
            names += [info.name for info in page.sessions]
            after = page.after
            if after is None:
                break
    assert names == [f"n{number}" for number in reversed(range(MANY))]


VERBS: dict[str, Callable[[SessionManager], object]] = {
    "check": lambda manager: manager.check(),
    "plan": lambda manager: manager.plan_gc().nbytes,
    "usage": lambda manager: manager.usage(),
    "page": lambda manager: manager.page(20),
}


@pytest.mark.parametrize("verb", VERBS)
def test_more_sessions_take_no_more_memory(folders: dict[int, Path], verb: str) -> None:
    """Of Python's own: pages of the temporary file are bounded besides."""
    few, many = (peak(folders[count], VERBS[verb]) for count in (FEW, MANY))
    assert many < few + 300_000  # the manifests of all are 6 MB


def test_gc_takes_no_more_memory_and_just_what_nothing_needs(folders: dict[int, Path]) -> None:
    peaks = {}
    for count, folder in folders.items():
        with closing(reopened(folder)) as store:
            superseded = count // 10
            assert len(SessionManager(store, policy=POLICY).plan_gc().blobs) == superseded
        peaks[count] = peak(folder, lambda manager: manager.collect(manager.plan_gc()))
        with closing(reopened(folder)) as store:
            manager = SessionManager(store, policy=POLICY)
            assert len(manager.plan_gc().blobs) == 0
            report = manager.check()
            assert (report.clean, report.num_sessions, report.orphans) == (True, count, 0)
    assert peaks[MANY] < peaks[FEW] + 300_000


def peak(folder: Path, verb: Callable[[SessionManager], object]) -> int:
    """The most bytes that Python had in use while `verb` was done, beyond those before."""
    with closing(reopened(folder)) as store:
        manager = SessionManager(store, policy=POLICY)
        verb(manager)  # what is made once only is there by now
        tracemalloc.start()
        try:
            verb(manager)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

"""Stores of many sessions: what is done while someone waits, and the memory that a look at all takes."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import tell
from benchmarks.many import FINGERPRINT, fill, tokens_in, unsynced
from serialization.blobs import Store
from sessions.catalog import Catalog
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.names import SESSIONS
from sessions.policy import Policy
from sessions.prefix import PrefixIndex
from sessions.stores.open import open_store

MANY, FEWER = 100_000, 10_000
PAGE = 20
_TIMES = 50
#: gc may take what is older than this at once.
_POLICY = Policy(lease=0.01, grace=0.02, budget=1 << 40)


@dataclass(frozen=True, slots=True)
class Place:
    """A store's address, and its folder of keys where it is sealed."""

    kind: str
    url: str
    keys: str | None = None

    def open(self) -> Store:
        keyring = None if self.keys is None else Keyring(Path(self.keys), MasterKeys([b"m" * 32]))
        return open_store(self.url, keyring=keyring)


def run(counts: tuple[int, ...] = (FEWER, MANY)) -> None:
    for kind in ("disk", "sealed", "redis"):
        for count in counts:
            with _made(kind, count) as place:
                waited_for(place, count)
                for verb in ("check", "gc"):
                    tell("going through all", verb=verb, store=kind, sessions=count, **child(verb, place))
    for verb in ("check", "gc"):
        with _made("disk", 0) as place:
            tell("going through all", verb=verb, store="disk", sessions=0, **child(verb, place))


def waited_for(place: Place, count: int) -> None:
    """Medians of what a person or a request waits for, each time for another session."""
    chosen = random.Random(7)
    with closing(place.open()) as store:
        ids = [ref.removeprefix(SESSIONS) for ref, _ in store.last_refs(SESSIONS, None, count)]
        manager, prefixes = SessionManager(store), PrefixIndex(store, "default")
        later = tuple(range(4000))
        verbs: dict[str, Callable[[], object]] = {
            "list a page": lambda: manager.page(PAGE),
            "list a page in the midst": lambda: manager.page(PAGE, chosen.choice(ids)),
            "longest prefix, found": lambda: _found(prefixes, chosen.randrange(count), later),
            "longest prefix, none": lambda: prefixes.find(FINGERPRINT, (chosen.randrange(1 << 20), *later)),
            "by id": lambda: Catalog(store).session(chosen.choice(ids)),
            "by the start of an id": lambda: Catalog(store).find(chosen.choice(ids)[:9]),
            "by name": lambda: Catalog(store).find(f"n{chosen.randrange(count)}"),
            "open": lambda: place.open().close(),
        }
        for verb, work in verbs.items():
            taken = sorted(_seconds(work) for _ in range(_TIMES))
            tell(
                "waited for",
                verb=verb,
                store=place.kind,
                sessions=count,
                median_ms=1000 * statistics.median(taken),
                p95_ms=1000 * taken[int(0.95 * _TIMES)],
            )


def _found(prefixes: PrefixIndex, number: int, later: tuple[int, ...]) -> None:
    found = prefixes.find(FINGERPRINT, (*tokens_in(number), *later))
    assert found is not None, "nothing was found"
    assert found.manifest.name == f"n{number}", "another session than was asked for"


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def child(verb: str, place: Place) -> dict[str, object]:
    """Of a process that does just this: its peak memory, and how long the verb took."""
    given = json.dumps([verb, place.kind, place.url, place.keys])
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks.scale import in_child; in_child()", given],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def in_child() -> None:
    verb, *place = json.loads(sys.argv[1])
    with closing(Place(*place).open()) as store:
        manager = SessionManager(store, policy=_POLICY)
        before, started = _peak(), time.perf_counter()
        if verb == "check":
            assert manager.check().clean, "a new store has a problem"
        else:
            manager.collect(manager.plan_gc())
        seconds = time.perf_counter() - started
    print(json.dumps({"s": seconds, "more_MB": (_peak() - before) / 1e6, "peak_MB": _peak() / 1e6}))


def _peak() -> int:
    """The most bytes that this process had in memory so far. `getrusage` counts its parent, too."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("this system does not tell a process's peak memory")


@contextmanager
def _made(kind: str, count: int) -> Iterator[Place]:
    """A store of `count` sessions, gone at the end."""
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="tenuto-many-")
        stack.callback(shutil.rmtree, folder)
        place = Place(kind, f"{folder}/store", f"{folder}/keys" if kind == "sealed" else None)
        if kind == "redis":
            from tests.redis_server import RedisServer

            place = Place(kind, stack.enter_context(RedisServer()).url)
        with unsynced(), closing(place.open()) as store:
            fill(store, count)
        yield place

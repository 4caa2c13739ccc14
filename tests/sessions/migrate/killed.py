"""A migration in a process of its own, which is killed; and what is compared of a store of any size."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from blake3 import blake3

from benchmarks.many import unsynced
from cli.main import execute
from serialization.blobs import BlobClass, BlobId, Store
from serialization.manifest import Manifest, ManifestKind, Origin
from sessions import names
from sessions.stores.open import open_store
from sessions.uses import USES
from tests.serialization.states import ATTENTION
from tests.sessions.migrate.places import session_of

#: Sessions whose refs are written at once.
_BATCH = 500
#: What a store is compared by: everything but the hints that it makes itself.
KEPT = (names.SESSIONS, names.PINS, names.NAMES, USES)


class Child:
    """The command line in a process of its own: a fork of this one, which has imported everything by now."""

    def __init__(self, *arguments: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments)

    def _run(self, arguments: tuple[str, ...]) -> None:
        code = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for stream in (1, 2):
                os.dup2(self._said.fileno(), stream)
            sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            code = execute(arguments)
            sys.stdout.flush()
        finally:
            os._exit(code)

    def is_running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def send(self, number: signal.Signals) -> None:
        if self.is_running():
            os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for it: its exit code, and what it said."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with self._said as said:
            said.seek(0)
            return self.code, said.read().decode()


def run(source: str, target: str, *options: str) -> tuple[int, str]:
    """To its end: its exit code, and what it said."""
    return Child("migrate", source, target, *options).end()


@contextmanager
def looked_at(url: str) -> Iterator[Store]:
    with closing(open_store(url)) as store:
        yield store


def digests(store: Store) -> dict[str, bytes]:
    """Of each ref that is kept a digest of its value, and of all bytes that it leads to, each read and
    verified; blobs that sessions share are read once."""
    seen: dict[str, bytes] = {}
    found = {}
    for prefix in KEPT:
        for ref, value in store.list_refs(prefix):
            digest = blake3(value)
            if prefix in (names.SESSIONS, names.PINS):
                data = store.get(value.decode())  # type: ignore[arg-type]
                digest.update(data)
                for blob in Manifest.decode(data).blobs():
                    if blob.blob not in seen:
                        seen[blob.blob] = blake3(store.get(blob.blob)).digest()
                    digest.update(seen[blob.blob])
            found[ref] = digest.digest()
    return found


def killed_at_random(
    source: str, target: str, chance: random.Random, kills: int, most: float
) -> tuple[int, int]:
    """Begin the migration and kill it, so many times, each after up to `most` seconds of moving. Returns how
    many sessions were there at the last look, and how often it was killed in the midst."""
    in_the_midst = 0
    arrived = 0
    for _ in range(kills):
        child = Child("migrate", source, target)
        await_begin(child, target, arrived)
        time.sleep(chance.uniform(0, most))
        child.send(signal.SIGKILL)
        code, _ = child.end()
        with looked_at(target) as store:
            now = sum(1 for _ in store.list_refs(names.SESSIONS))
        in_the_midst += code == -signal.SIGKILL and now > arrived
        assert now >= arrived, "something is lost"
        arrived = now
    return arrived, in_the_midst


def await_begin(child: Child, target: str, arrived: int = 0) -> None:
    """Until it has moved something: before that there is nothing to come in the midst of."""
    while child.is_running() and not _is_there(target):
        time.sleep(0.005)
    with looked_at(target) as store:
        while child.is_running() and sum(1 for _ in store.list_refs(names.SESSIONS)) <= arrived:
            time.sleep(0.005)


def _is_there(url: str) -> bool:
    """A folder that is being made must not be made by who looks, too."""
    return url.startswith("redis:") or any(Path(url).glob("tenants/*/blobs"))


def fill_rich(url: str, count: int) -> None:
    """So many sessions, half of them with rows of their own and half forks that share them; every fifth of
    the first is kept, and each was used."""
    with unsynced(), closing(open_store(url)) as store:
        for first in range(0, count, _BATCH):
            store.hint(
                dict(
                    chain.from_iterable(_refs(store, n) for n in range(first, min(first + _BATCH, count), 2))
                )
            )


def _refs(store: Store, number: int) -> Iterator[tuple[str, bytes]]:
    """What names session `number`, its fork, and what was kept of it."""
    manifest = session_of(store, number, f"n{number}", 40, layout=ATTENTION)
    blob = yield from _named(store, manifest)
    origin = Origin(manifest.session, blob, manifest.length)
    fork = replace(manifest, session=names.new_session_id(), name=f"f{number}", forked_from=origin)
    yield from _named(store, fork)
    if number % 10 == 0:
        pin = replace(manifest, kind=ManifestKind.PIN, pin=f"kept{number}")
        yield names.pin_ref(f"kept{number}"), store.put(BlobClass.MANIFEST, pin.encode()).encode()


def _named(store: Store, manifest: Manifest) -> Generator[tuple[str, bytes], None, BlobId]:
    blob = store.put(BlobClass.MANIFEST, manifest.encode())
    yield names.session_ref(manifest.session), blob.encode()
    yield names.name_ref(manifest.name or ""), manifest.session.encode()
    yield USES + manifest.session, b"\x41\xd9\x55\x55\x55\x55\x55\x55"
    return blob

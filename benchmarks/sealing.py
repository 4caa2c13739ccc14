"""What sealing costs: saves, turns, resumes and single blobs, against the same store in the clear."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from benchmarks.figures import english, tell
from engine.config import EngineConfig
from engine.loader import load_engine
from serialization.blobs import BlobClass, Store
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.stores.open import open_store

T = TypeVar("T")

#: What a whole chunk of SmolLM2 is, encoded.
_BLOB_NBYTES = 3_900_000
_ROUNDS = 15


def run(model: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keyring = Keyring(Path(folder) / "keys", MasterKeys([b"m" * 32]))
        with (
            closing(open_store(f"{folder}/clear")) as clear,
            closing(open_store(f"{folder}/sealed", keyring=keyring)) as sealed,
        ):
            _blobs(clear, sealed)
            _sessions(model, path, clear, sealed)


def _blobs(clear: Store, sealed: Store) -> None:
    """One blob, put and got: on disk, in the page cache."""
    taken: dict[str, list[float]] = {}
    for _ in range(2 * _ROUNDS):
        data = os.urandom(_BLOB_NBYTES)
        for kind, store in (("clear", clear), ("sealed", sealed)):
            blob = _timed(
                taken, f"put {kind}", lambda store=store, data=data: store.put(BlobClass.ROWS, data)
            )  # type: ignore[misc]
            _timed(taken, f"get {kind}", lambda store=store, blob=blob: store.get(blob))  # type: ignore[misc]
            store.delete_blob(blob, 0)
    for verb in ("put", "get"):
        _told("sealing a blob", taken, verb, nbytes=_BLOB_NBYTES)


def _sessions(model: str, path: Path, clear: Store, sealed: Store) -> None:
    """2,000 tokens saved as a whole and resumed, and a turn of 50 on top."""
    engine = load_engine(path, EngineConfig(n_ctx=4096, num_cells=2 * 4096, num_seqs=2))
    text = engine.tokenizer.encode(english())
    seq = engine.create()
    engine.feed(seq, text[:2000])
    engine.decode([seq])
    managers = {"clear": SessionManager(clear, engine), "sealed": SessionManager(sealed, engine)}
    taken: dict[str, list[float]] = {}
    for round_ in range(_ROUNDS):
        for kind, manager in managers.items():
            session = manager.create()
            _timed(taken, f"save {kind}", lambda m=manager, s=session: m.save(s, seq, ()))  # type: ignore[misc]
            again, _ = _timed(taken, f"resume {kind}", lambda m=manager, s=session: m.resume(s))  # type: ignore[misc]
            engine.feed(again, text[3000 + 50 * round_ : 3049 + 50 * round_])
            engine.decode([again])
            _timed(taken, f"turn {kind}", lambda m=manager, s=session, q=again: m.save(s, q, ()))  # type: ignore[misc]
            engine.rewind(again, 0)
            engine.close(again)
            session.close()
            for info in list(manager.store.list_blobs()):
                manager.store.delete_blob(info.blob, 0)
    for verb in ("save", "turn", "resume"):
        _told("sealing a session of 2,000 tokens", taken, verb, model=model)


def _timed(taken: dict[str, list[float]], what: str, work: Callable[[], T]) -> T:
    started = time.perf_counter()
    done = work()
    taken.setdefault(what, []).append(time.perf_counter() - started)
    return done


def _told(figure: str, taken: dict[str, list[float]], verb: str, **about: object) -> None:
    clear, sealed = (statistics.median(taken[f"{verb} {kind}"]) for kind in ("clear", "sealed"))
    tell(figure, verb=verb, clear_s=clear, sealed_s=sealed, ratio=sealed / clear, **about)

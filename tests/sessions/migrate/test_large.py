"""An archive of 5 GiB streams through, in memory that does not depend on its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from blake3 import blake3

from engine.state import PartKind, PartSpec, Provenance, Rows, Span
from serialization.archive import check_archive, write_archive
from serialization.blobs import BlobClass, BlobId, blob_id
from serialization.buffers import NEW, Buffers
from serialization.chunks import CHUNK_TOKENS, encode_rows
from serialization.manifest import Manifest, Message
from serialization.pipelines import codec_set
from serialization.refs import BlobRef, ChunkBlob, ChunkRef
from sessions.stores.memory import MemoryStore
from tests.serialization.states import EMPTY, PENDING, tokens_of

ROOT = Path(__file__).parents[3]
#: Rows of a model with 32 layers, 8 heads of 128 values: 64 KiB a token.
LAYOUT = (PartSpec("k", PartKind.TOKEN, 0, "bf16", (256, 128)),)
#: Of the whole process, Python and its libraries with it.
MOST = 500 * 10**6


class Endless(MemoryStore):
    """A store of rows that are made when they are asked for, and that no codec makes smaller."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self._numbers: dict[BlobId, int] = {}
        chunks = []
        for number in range(num_chunks):
            data = self._rows(number)
            blob = blob_id(BlobClass.ROWS, data)
            self._numbers[blob] = number
            raw = CHUNK_TOKENS * LAYOUT[0].row_nbytes
            start = number * CHUNK_TOKENS
            ref = ChunkBlob(PartKind.TOKEN, start, BlobRef(blob, raw, len(data)))
            chunks.append(ChunkRef(start, start + CHUNK_TOKENS, (ref,)))
        length = num_chunks * CHUNK_TOKENS
        self.manifest = replace(
            EMPTY,
            name="tea",
            title="a long talk of tea",
            layout=LAYOUT,
            tokens=tokens_of(length),
            messages=(Message("user", "What of tea?", 0, 20), Message("assistant", "Much.", 20, length)),
            spans=(Span(0, length, Provenance.IMPORTED),),
            chunks=tuple(chunks),
            edge=PENDING,
            generation=1,
        )

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> bytes:
        return self._rows(self._numbers[blob])

    def _rows(self, number: int) -> bytes:
        chance = np.random.default_rng(number)
        made = chance.integers(0, 256, (CHUNK_TOKENS, LAYOUT[0].row_nbytes), dtype=np.uint8)
        start, stop = number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS
        rows = Rows(PartKind.TOKEN, start, stop, (torch.from_numpy(made),))
        return encode_rows(PartKind.TOKEN, LAYOUT, start, stop, (rows,), codec_set("raw"))


def moved(source: str, target: str, out: IO[bytes] | int = subprocess.DEVNULL) -> tuple[float, int]:
    """Run the command line, whole. Returns the seconds it took and the most bytes it had in memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "migrate", "-q", source, target],
        cwd=ROOT,
        env=environment,
        stdout=out,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return time.monotonic() - begun, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def through(folder: Path, num_chunks: int) -> dict[str, object]:
    """Archive to archive (as a stream), archive to store, store to archive."""
    made = Endless(num_chunks)
    first, store, last = folder / "first.tenuto", f"{folder}/store/", folder / "last.tenuto"
    with first.open("wb") as out:
        nbytes = write_archive(out, made.manifest, made)
    told: dict[str, object] = {"archive": nbytes}

    def note(way: str, act: Callable[[], tuple[float, int]]) -> None:
        seconds, most = act()
        told[way] = {"seconds": round(seconds, 1), "most": most}
        assert most < MOST, f"{way}: {most:,} bytes"

    note("archive to archive", lambda: _streamed(first, nbytes))
    note("archive to store", lambda: moved(str(first), store))
    first.unlink()
    note("store to archive", lambda: moved(f"{store}#tea", str(last)))
    with last.open("rb") as file:
        arrived = check_archive(file)
    assert [ref.blob for ref in arrived.blobs()] == [ref.blob for ref in made.manifest.blobs()]
    assert arrived.tokens == made.manifest.tokens
    return told


def _streamed(path: Path, nbytes: int) -> tuple[float, int]:
    """What comes out of a pipe is what was in the file."""
    reading, writing = os.pipe()
    seen: list[tuple[int, bytes]] = []

    def read() -> None:
        digest, count = blake3(), 0
        with os.fdopen(reading, "rb") as pipe:
            while piece := pipe.read(2**20):
                digest.update(piece)
                count += len(piece)
        seen.append((count, digest.digest()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        found = moved(str(path), "-", writing)
    finally:
        os.close(writing)
        reader.join()
    whole = blake3()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            whole.update(piece)
    assert seen == [(nbytes, whole.digest())]
    return found


def test_what_is_made_is_an_archive_that_can_be_read(tmp_path: Path) -> None:
    """Of the large test's own: in small."""
    made = Endless(2)
    path = tmp_path / "first.tenuto"
    with path.open("wb") as out:
        write_archive(out, made.manifest, made)
    with path.open("rb") as file:
        read: Manifest = check_archive(file)
    assert read == made.manifest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_archive_of_five_gib_takes_no_more_than_half_a_gigabyte_of_memory(tmp_path: Path) -> None:
    told = through(tmp_path, 5 * 2**30 // (CHUNK_TOKENS * LAYOUT[0].row_nbytes))
    print(json.dumps(told))
    assert int(str(told["archive"])) > 5 * 2**30

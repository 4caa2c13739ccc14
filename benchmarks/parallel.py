"""One model in one process and divided among two: speed, and what each process keeps.

On one machine the ranks share its processors, so there is nothing to be won but room: two halves of the work,
and for every layer two exchanges between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import english, tell
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine

DEPTH, STEPS, ROUNDS = 1024, 48, 3


def run(model: str, path: Path) -> None:
    """Each number of ranks in processes of its own, so that memory is what it needs."""
    for size in (1, 2):
        subprocess.run([sys.executable, "-m", "benchmarks.parallel", model, str(path), str(size)], check=True)


def measure(model: str, path: Path, size: int) -> None:
    started = time.perf_counter()
    engine = load_engine(path, EngineConfig(n_ctx=2048, num_cells=4096, num_seqs=2, tp=size))
    loaded = time.perf_counter() - started
    text = engine.tokenizer.encode(english())
    figures = [_figures(engine, [1000 + turn, *text[1:DEPTH]]) for turn in range(ROUNDS)]
    prefill, decode = (max(column) for column in zip(*figures, strict=True))
    pids = (os.getpid(), *engine.rank_pids.values())
    tell(
        "tensor parallel",
        model=model,
        ranks=size,
        threads_each=engine.config.threads,
        load_s=loaded,
        prefill_tokens_s=prefill,
        decode_tokens_s=decode,
        MB_each=" ".join(f"{_own_memory(pid) / 2**20:.0f}" for pid in pids),
    )
    engine.end()


def _figures(engine: Engine, tokens: Sequence[int]) -> tuple[float, float]:
    seq = engine.create()
    started = time.perf_counter()
    engine.feed(seq, tokens)
    read = time.perf_counter()
    for _ in range(STEPS):
        engine.decode([seq])
    done = time.perf_counter()
    engine.rewind(seq, 0)
    engine.close(seq)
    return len(tokens) / (read - started), STEPS / (done - read)


def _own_memory(pid: int) -> int:
    """Bytes that are this process's alone, not pages of a file that it has read."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

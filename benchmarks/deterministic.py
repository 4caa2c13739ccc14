"""What the deterministic mode costs: reading, decoding, and decoding of forks, which cannot share a pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import english, tell
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine

DEPTH, STEPS, ROUNDS, TOGETHER = 1024, 32, 3, 4


def run(model: str, path: Path) -> None:
    """Rounds take turns, so that a busy machine is busy for both modes; the better of each counts."""
    ordinary, deterministic = (_engine(path, mode) for mode in (False, True))
    text = ordinary.tokenizer.encode(english())
    plain, exact = [], []
    for turn in range(ROUNDS):
        tokens = [1000 + turn, *text[1:DEPTH]]  # a first token of its own: no prefix is shared
        plain.append(_speeds(ordinary, tokens))
        exact.append(_speeds(deterministic, tokens))
    names = (
        f"deterministic prefill of {DEPTH:,}",
        f"deterministic decode at depth {DEPTH:,}",
        f"deterministic decode of {TOGETHER} forks together",
    )
    both = zip(names, zip(*plain, strict=True), zip(*exact, strict=True), strict=True)
    for name, a, b in both:
        tell(name, model=model, tokens_s=max(b), ordinary_tokens_s=max(a), ratio=max(b) / max(a))


def _engine(path: Path, deterministic: bool) -> Engine:
    cells = (TOGETHER + 1) * 2 * DEPTH
    return load_engine(
        path,
        EngineConfig(n_ctx=2 * DEPTH, num_cells=cells, num_seqs=TOGETHER, deterministic=deterministic),
    )


def _speeds(engine: Engine, tokens: Sequence[int]) -> tuple[float, float, float]:
    """Tokens a second: read, decoded by one sequence, and by forks of it that are equally long."""
    seq = engine.create()
    started = time.perf_counter()
    engine.feed(seq, tokens)
    read = time.perf_counter()
    for _ in range(STEPS):
        engine.decode([seq])
    alone = time.perf_counter()
    seqs = [seq, *(engine.fork(seq) for _ in range(TOGETHER - 1))]
    for _ in range(STEPS // 4):
        engine.decode(seqs)
    done = time.perf_counter()
    for each in seqs:
        engine.rewind(each, 0)
        engine.close(each)
    decoded = STEPS // 4 * TOGETHER / (done - alone)
    return len(tokens) / (read - started), STEPS / (alone - read), decoded

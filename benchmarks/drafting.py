"""Speculative decoding: tokens accepted per step and speed, beside plain decoding in the same run.

The prompt asks for a file of code with one change, which is where n-grams are right; the model as its own
drafter shows what it costs when every guess is right and none is free.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import tell
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.speculative.choice import Draft

STEPS, ROUNDS = 256, 3
EDIT = Path(__file__).with_name("editing.txt")


def editing_prompt(engine: Engine) -> list[int]:
    """Token ids of the question, and of how the answer begins: with the file, not with talk about it."""
    assert engine.template is not None
    question = (
        "In this file rename the class JobQueue to TaskQueue. Answer with the whole file, nothing else.\n\n"
        f"```python\n{EDIT.read_text(encoding='utf-8')}```"
    )
    asked = engine.template.render([{"role": "user", "content": question}])
    return [*engine.tokenizer.encode_pieces(asked), *engine.tokenizer.encode("```python\n")]


@dataclass(frozen=True, slots=True)
class Run:
    """What was said, how fast, and in how many steps."""

    tokens: tuple[int | None, ...]
    tokens_s: float
    steps: int
    drafted: int
    accepted: int


def decode(engine: Engine, most: int = STEPS) -> Run:
    """The first `most` tokens of the greedy answer."""
    seq, before = engine.create(), _sums(engine)
    engine.feed(seq, editing_prompt(engine))
    started = time.perf_counter()
    tokens = tuple(piece.token for piece in engine.generate(seq, max_tokens=most))
    taken = time.perf_counter() - started
    engine.close(seq)
    steps, drafted, accepted = (now - then for now, then in zip(_sums(engine), before, strict=True))
    plain = len(tokens) - accepted - steps  # first tokens, and where nothing was guessed
    return Run(tokens, len(tokens) / taken, steps + plain, drafted, accepted)


def _sums(engine: Engine) -> tuple[int, int, int]:
    figures = engine.figures
    return (0, 0, 0) if figures is None else (figures.steps, figures.drafted, figures.accepted)


def run(name: str, path: Path) -> None:
    """Plain and drafted decoding take turns, in the ordinary mode and in the deterministic one."""
    drafts = {"none": None, "ngram": Draft("ngram", 8), "itself": Draft(str(path), 4)}
    for mode in (False, True):
        config = EngineConfig(n_ctx=4096, num_seqs=1, deterministic=mode)
        engines = {draft: load_engine(path, config, draft=drafts[draft]) for draft in drafts}
        runs = {draft: [decode(engine)] for draft, engine in engines.items()}
        for _ in range(ROUNDS - 1):
            for draft, engine in engines.items():
                runs[draft].append(decode(engine))
        plain = statistics.median(one.tokens_s for one in runs["none"])
        for draft in ("ngram", "itself"):
            last = runs[draft][-1]
            speed = statistics.median(one.tokens_s for one in runs[draft])
            tell(
                "drafting",
                model=name,
                draft=draft,
                deterministic=mode,
                tokens_s=speed,
                plain_tokens_s=plain,
                ratio=speed / plain,
                tokens_per_step=len(last.tokens) / last.steps,
                accepted=last.accepted / max(1, last.drafted),
                same_text=last.tokens == runs["none"][-1].tokens,
            )

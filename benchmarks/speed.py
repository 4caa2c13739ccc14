"""Reading and decoding speed against transformers, both in bf16 in one process; and peak memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import tell
from engine.runner import Engine

DEPTH, STEPS, ROUNDS = 1024, 48, 3


def peak_memory(model: str) -> None:
    """Of this process so far."""
    tell("peak memory", model=model, MB=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def run(model: str, engine: Engine, path: Path, text: Sequence[int]) -> None:
    """Rounds take turns, so that a busy machine is busy for both."""
    rival = _transformers(path)
    ours, theirs = [], []
    for turn in range(ROUNDS):
        tokens = [1000 + turn, *text[1:DEPTH]]  # a first token of its own: no prefix is shared
        ours.append(_ours(engine, tokens))
        theirs.append(_theirs(rival, tokens))
    mine, other = (
        [max(column) for column in zip(*ours, strict=True)],
        [max(column) for column in zip(*theirs, strict=True)],
    )
    for name, a, b in zip(("prefill of 1,024", "decode at depth 1,024"), mine, other, strict=True):
        tell(name, model=model, tokens_s=a, transformers_tokens_s=b, ratio=a / b)


def _ours(engine: Engine, tokens: Sequence[int]) -> tuple[float, float]:
    seq = engine.create()
    started = time.perf_counter()
    engine.feed(seq, tokens)
    read = time.perf_counter()
    for _ in range(STEPS):
        engine.decode([seq])
    done = time.perf_counter()
    engine.close(seq)
    return len(tokens) / (read - started), STEPS / (done - read)


def _transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.bfloat16)
    return model.eval()  # type: ignore[no-untyped-call]


def _theirs(model: Any, tokens: Sequence[int]) -> tuple[float, float]:
    with torch.inference_mode():
        ids = torch.tensor([list(tokens)])
        started = time.perf_counter()
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        read = time.perf_counter()
        for _ in range(STEPS):
            following = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(input_ids=following, past_key_values=out.past_key_values, use_cache=True)
        done = time.perf_counter()
    return len(tokens) / (read - started), STEPS / (done - read)

"""What else an engine does, with a model that is divided: guesses, device states, passes of one shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.speculative.choice import Draft
from tests.engine.parallel.comparing import logits_after, same_bytes, told
from tests.engine.parallel.threads import divided, threads_as_ranks
from tests.exact.members import MEMBERS, folder
from tests.oracles import base, deepseek_v3_mtp, qwen3_next_mtp
from tests.oracles.mtp import Oracle

PROMPT, MORE = base.tokens(count=30), base.tokens(seed=2, count=8)
#: What repeats can be foreseen.
REPEATED = base.tokens(count=8) * 4


def said(engine: Engine, prompt: list[int], count: int) -> tuple[int, ...]:
    """Greedily."""
    seq = engine.create()
    engine.feed(seq, prompt)
    out: list[int] = []
    while len(out) < count:
        out += engine.step(seq, count - len(out))
    return tuple(out)


def ngram_of(family: str) -> Callable[[Path], Draft]:
    def draft(place: Path) -> Draft:
        base.write(family, place)
        return Draft("ngram", 4)

    return draft


def mtp_of(make: Callable[..., Oracle], **changes: Any) -> Callable[[Path], Draft]:
    def draft(place: Path) -> Draft:
        make(share=0.15, **changes).write(place)
        return Draft("mtp", 3)

    return draft


def itself(place: Path) -> Draft:
    base.write("llama", place)
    return Draft(str(place), 4)


DRAFTS = {
    "ngram, llama": ngram_of("llama"),
    "a model": itself,
    "mtp, deepseek_v3": mtp_of(deepseek_v3_mtp.oracle, num_depths=2),
    "mtp, qwen3_next": mtp_of(qwen3_next_mtp.oracle),
}


@pytest.mark.parametrize("drafting", DRAFTS)
def test_who_guesses_is_alone_and_right(drafting: str, tmp_path: Path) -> None:
    """Drafters are rank 0's, whole; what they guess is verified by all ranks in one batch."""
    draft = DRAFTS[drafting](tmp_path)
    config = EngineConfig(
        n_ctx=256, num_cells=1024, max_batch=64, dtype="f32", type_k="f32", type_v="f32", threads=1, tp=2
    )
    with threads_as_ranks(2):
        engine = load_engine(tmp_path, config)
        plain = said(engine, REPEATED, 24)
        engine.end()
    with threads_as_ranks(2):
        engine = load_engine(tmp_path, config, draft=draft)
        assert said(engine, REPEATED, 24) == plain
        assert engine.figures is not None
        assert engine.figures.accepted > 0
        seq = engine.create()
        engine.feed(seq, PROMPT)
        state = engine.snapshot(seq)
        assert same_bytes(engine.snapshot(engine.restore(state)), state)
        engine.end()


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v4", "qwen3_next", "falcon_h1"])
def test_wrong_guesses_are_taken_back_on_every_rank(family: str) -> None:
    """In passes of one shape to the bit: as if nothing had been guessed."""
    with divided(folder(family), 2, deterministic=True, rollback=4) as engine:
        seq, plain = engine.create(), engine.create()
        for one in (seq, plain):
            engine.feed(one, PROMPT)
        right = engine.choose(plain)
        (after,) = told(engine, plain, (right,))
        wrong = int(after.argmin())
        pending = engine.choose(seq)
        step = engine.advance({seq: (pending,)}, {seq: (wrong, wrong, wrong)})[seq]
        assert (step.accepted, step.tokens) == (0, (int(after.argmax()),))
        assert engine.tokens(seq) == engine.tokens(plain)
        assert torch.equal(torch.stack(told(engine, seq, MORE)), torch.stack(told(engine, plain, MORE)))


#: the others are slow: a pass for every token, of every layer
QUICK = ("llama", "minimax_m3", "falcon_h1")
GRID = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in MEMBERS]


@pytest.mark.parametrize("family", GRID)
def test_in_passes_of_one_shape_no_bit_depends_on_how_tokens_are_cut(family: str) -> None:
    """Also where ranks add up what they have: each sum is over the ranks, in their order."""
    with divided(folder(family), 3, deterministic=True) as engine:
        seq, other = engine.create(), engine.create()
        engine.feed(seq, PROMPT)
        at_once = [logits_after(engine, seq), *told(engine, seq, MORE)]
        told(engine, other, PROMPT[:-1])
        one_by_one = told(engine, other, (PROMPT[-1], *MORE))
        assert torch.equal(torch.stack(one_by_one), torch.stack(at_once))
        assert same_bytes(engine.snapshot(seq), engine.snapshot(other))


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v4", "qwen3_next"])
def test_a_device_state_is_of_all_ranks(family: str) -> None:
    with divided(folder(family), 2) as engine:
        seq = engine.create()
        engine.feed(seq, PROMPT)
        handle = engine.device_snapshot(seq)
        live = told(engine, seq, MORE)
        engine.device_restore(handle, seq)
        assert torch.equal(torch.stack(told(engine, seq, MORE)), torch.stack(live))
        aside = engine.device_restore(handle)
        assert torch.equal(torch.stack(told(engine, aside, MORE)), torch.stack(live))


def test_a_canary_is_computed_by_all_ranks() -> None:
    with divided(folder("qwen3_next"), 2) as engine:
        seq = engine.create()
        engine.feed(seq, PROMPT)
        state = engine.snapshot(seq)
        assert state.canary is not None
        assert engine.canary_drift(seq, state.canary) <= 1e-4
        assert same_bytes(engine.snapshot(seq), state)

"""A real model that drafts says what it says without, and editing code it does so in far fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.drafting import Run, decode, editing_prompt
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.speculative.choice import Draft
from engine.state import SamplerParams

pytestmark = pytest.mark.real

#: How far the logits of two shapes of a batch may be apart, float32 over rows in bf16: the rows differ in
#: their last bit where float32 values differ in theirs.
DRIFT = 0.1
STEPS = 96


def engine_of(path: Path, draft: Draft | None, **settings: object) -> Engine:
    config = {"n_ctx": 2048, "num_seqs": 1, "threads": 1, "dtype": "f32", **settings}
    return load_engine(path, EngineConfig.from_mapping(config), draft=draft)


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> dict[bool, Run]:
    """The answer without a drafter, by mode."""
    return {mode: decode(engine_of(smollm2_path, None, deterministic=mode), STEPS) for mode in (True, False)}


@pytest.mark.parametrize("most", [3, 8])
def test_with_ngrams_the_deterministic_mode_says_the_same_in_fewer_steps(
    smollm2_path: Path, plain: dict[bool, Run], most: int
) -> None:
    drafted = decode(engine_of(smollm2_path, Draft("ngram", most), deterministic=True), STEPS)
    assert drafted.tokens == plain[True].tokens
    assert len(drafted.tokens) / drafted.steps > 1.5
    assert drafted.accepted > 0.3 * drafted.drafted


def test_as_its_own_drafter_it_is_right_about_all(smollm2_path: Path, plain: dict[bool, Run]) -> None:
    for mode in (True, False):
        engine = engine_of(smollm2_path, Draft(str(smollm2_path), 4), deterministic=mode)
        drafted = decode(engine, STEPS)
        wrong = drafted.drafted - drafted.accepted
        assert wrong == 0 if mode else wrong <= 0.02 * drafted.drafted
        if mode:
            assert drafted.tokens == plain[mode].tokens


def test_elsewhere_it_says_the_same_up_to_a_choice_closer_than_the_drift(
    smollm2_path: Path, plain: dict[bool, Run]
) -> None:
    drafted = decode(engine_of(smollm2_path, Draft("ngram", 8)), STEPS)
    same = [a == b for a, b in zip(drafted.tokens, plain[False].tokens, strict=False)]
    if all(same):
        return
    at = same.index(False)
    engine = engine_of(smollm2_path, None)
    seq = engine.create()
    engine.feed(seq, editing_prompt(engine))
    for token in plain[False].tokens[:at]:
        assert token is not None
        engine.advance({seq: (token,)})
    logits = engine.logits(seq)
    assert logits is not None
    first, second = torch.topk(logits, 2).values.tolist()
    assert first - second < DRIFT


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_sampled_text_is_the_same_too(smollm2_path: Path, draft: str) -> None:
    sampler = SamplerParams(temperature=0.8, top_p=0.95, repeat_penalty=1.1, seed=11)
    said = []
    for choice in (None, Draft("ngram" if draft == "ngram" else str(smollm2_path), 4)):
        engine = engine_of(smollm2_path, choice, deterministic=True)
        seq = engine.create(sampler)
        engine.feed(seq, editing_prompt(engine))
        said.append([piece.token for piece in engine.generate(seq, max_tokens=40)])
    assert said[0] == said[1]

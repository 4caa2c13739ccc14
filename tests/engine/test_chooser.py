"""A reply of which more is wanted says the same, and nothing that it may not say."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from engine.chooser import Chooser, Mask, logprobs
from engine.driver import Driver
from engine.errors import EngineError
from engine.grammar.json_object import JsonObject
from engine.grammar.masks import JsonMasks
from engine.reply import Logprobs, Piece
from engine.runner import Engine
from engine.sampler import sample
from engine.scheduler import Options, Said, Scheduler
from engine.shared import SharedEngine
from engine.speculative.ngram import NgramDrafter
from engine.state import NextLogits, SamplerParams
from tests.engine.conftest import MakeEngine

WARM = SamplerParams(temperature=0.9, top_p=0.95, presence_penalty=0.3, seed=5)
TEXT = "the same the same the same the same "


def said(
    engine: Engine, chooser: Chooser | None, sampler: SamplerParams = WARM, count: int = 24
) -> list[Piece]:
    seq = engine.create(sampler)
    engine.feed(seq, engine.tokenizer.encode(TEXT))
    pieces = list(engine.generate(seq, count, chooser=chooser))
    engine.close(seq)
    return pieces


class Only:
    """A constraint to some tokens that remembers what it was told."""

    def __init__(self, vocab: int, *tokens: int) -> None:
        self.mask = np.zeros(vocab, np.bool_)
        self.mask[list(tokens)] = True
        self.told: list[int] = []

    def allowed(self) -> Mask:
        return self.mask

    def push(self, token: int) -> None:
        self.told.append(token)


def test_log_probabilities_are_those_of_the_logits() -> None:
    logits = torch.tensor([1.0, 3.0, -2.0, 3.0, 0.5])
    told = logprobs(logits, 4, 3)
    expected = torch.log_softmax(logits.double(), 0).tolist()
    assert told.token == pytest.approx(expected[4])
    assert [token for token, _ in told.top] == [1, 3, 0]
    assert [value for _, value in told.top] == pytest.approx([expected[1], expected[3], expected[0]])
    assert logprobs(logits, 4, 0) == Logprobs(told.token, ())


def test_log_probabilities_of_tokens_that_cannot_be_are_infinite() -> None:
    told = logprobs(torch.tensor([0.0, -math.inf]), 1, 2)
    assert told == Logprobs(-math.inf, ((0, 0.0), (1, -math.inf)))


@pytest.mark.parametrize("sampler", [SamplerParams(), WARM])
def test_a_reply_with_log_probabilities_is_the_same(engine: Engine, sampler: SamplerParams) -> None:
    plain, told = said(engine, None, sampler), said(engine, Chooser(logprobs=4), sampler)
    assert [(p.token, p.text, p.finish) for p in told] == [(p.token, p.text, p.finish) for p in plain]
    for piece in told:
        assert piece.logprobs is not None
        assert len(piece.logprobs.top) == 4
        if sampler.temperature == 0:
            assert piece.logprobs.top[0] == (piece.token, piece.logprobs.token)


def test_log_probabilities_are_told_before_the_sampler_changes_anything(engine: Engine) -> None:
    seq = engine.create(SamplerParams(logit_bias=((7, 100.0),)))
    engine.feed(seq, engine.tokenizer.encode(TEXT))
    edge = engine.edge(seq)
    assert isinstance(edge, NextLogits)
    (piece,) = engine.generate(seq, 1, chooser=Chooser(logprobs=0))
    assert piece.token == 7
    assert piece.logprobs == logprobs(edge.logits[: engine.tokenizer.vocab_size], 7, 0)


def test_a_scheduler_says_the_same_with_others_in_its_batches(make_engine: MakeEngine) -> None:
    alone = said(make_engine(deterministic=True), Chooser(logprobs=2))
    engine = make_engine(deterministic=True)
    scheduler = Scheduler(engine)
    names = [
        scheduler.submit(engine.create(WARM), engine.tokenizer.encode(TEXT), Options(24, chooser=chooser))
        for chooser in (Chooser(logprobs=2), None, Chooser(constraint=Only(engine.tokenizer.vocab_size, 65)))
    ]
    pieces: dict[int, list[Piece]] = {name: [] for name in names}
    while len(scheduler):
        for event in scheduler.step():
            assert isinstance(event, Said)
            pieces[event.request].append(event.piece)
    assert pieces[names[0]] == alone
    assert [piece.token for piece in pieces[names[1]]] == [piece.token for piece in alone]
    assert [piece.token for piece in pieces[names[2]]] == [65] * 24


def test_only_what_is_allowed_is_said_and_the_constraint_hears_of_it(engine: Engine) -> None:
    only = Only(engine.tokenizer.vocab_size, 65, 66, 67)
    tokens = [piece.token for piece in said(engine, Chooser(constraint=only))]
    assert set(tokens) <= {65, 66, 67}
    assert only.told == tokens


def test_where_nothing_is_allowed_nothing_is_said(engine: Engine) -> None:
    with pytest.raises(EngineError, match="no token"):
        said(engine, Chooser(constraint=Only(engine.tokenizer.vocab_size)))


def test_what_is_allowed_is_drawn_as_often_as_it_is_likely_among_itself() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 5.0])
    allowed = np.array([True, True, True, False])
    warm = SamplerParams(temperature=1.0, seed=3)
    counts = np.bincount([sample(logits, warm, (), at, allowed) for at in range(4000)], minlength=4) / 4000
    expected = [*torch.softmax(logits[:3], 0).tolist(), 0.0]
    assert counts.tolist() == pytest.approx(expected, abs=0.03)
    for params in (SamplerParams(top_k=1, temperature=1.0), SamplerParams(min_p=0.9, temperature=1.0)):
        assert sample(logits, params, (), 0, allowed) == 0


def test_what_is_guessed_has_no_place_in_such_a_reply(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.speculate(NgramDrafter(), 4)
    repeating = SamplerParams(logit_bias=((65, 100.0),))
    only = Only(engine.tokenizer.vocab_size, 66)
    assert [piece.token for piece in said(engine, Chooser(constraint=only), repeating)] == [66] * 24
    scheduler, figures = Scheduler(engine), engine.figures
    assert figures is not None
    for chooser in (Chooser(logprobs=1), None):
        assert figures.drafted == 0
        options = Options(24, chooser=chooser)
        scheduler.submit(engine.create(repeating), engine.tokenizer.encode(TEXT), options)
        while len(scheduler):
            scheduler.step()
    assert figures.drafted > 0


def test_a_reply_in_json_is_json_or_the_beginning_of_it_and_the_same_each_time(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(deterministic=True)
    masks = JsonMasks(engine.tokenizer)
    # A model without sense: what closes is made likely, so that there is an end.
    ends = tuple(sorted((engine.tokenizer.encode(text)[0], 6.0) for text in '}"]'))
    sampler = SamplerParams(temperature=1.0, seed=1, logit_bias=ends)
    driver = Driver(make_engine(deterministic=True))
    shared = SharedEngine(driver)
    replies = []
    for say in (engine, engine):
        pieces = said(say, Chooser(constraint=JsonObject(masks)), sampler, count=300)
        assert pieces[-1].finish == "eos"
        replies.append("".join(piece.text for piece in pieces))
    assert isinstance(json.loads(replies[0]), dict)
    seq = shared.create(sampler)
    shared.feed(seq, engine.tokenizer.encode(TEXT))
    chooser = Chooser(constraint=JsonObject(masks))
    replies.append("".join(piece.text for piece in shared.generate(seq, 300, chooser=chooser)))
    driver.close()
    assert len(set(replies)) == 1

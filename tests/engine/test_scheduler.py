"""Requests share batches and nothing else: each reply is what it would be alone, and each error its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import stepping
from engine.batch import Batch, counts_of
from engine.cache.memory import Plan
from engine.errors import BatchRefused, ContextFull, EngineError, NoSlot
from engine.passes import Computed, compute
from engine.reply import Piece
from engine.runner import Engine
from engine.scheduler import Event, Failed, Options, Read, RequestId, Said, Scheduler
from engine.state import Pending, SamplerParams
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import begun, picture

TEXTS = ("the quick brown fox " * 9, "abc", "jumps over the lazy dog " * 3, "x")


def run(
    scheduler: Scheduler, told: dict[RequestId, list[Event]] | None = None
) -> dict[RequestId, list[Event]]:
    """Step until nothing is left to do; the events of each request, added to those `told`."""
    told = {} if told is None else told
    for _ in range(500):
        if not len(scheduler):
            return told
        tell(scheduler, told)
    raise AssertionError("it never ends")


def tell(scheduler: Scheduler, told: dict[RequestId, list[Event]]) -> None:
    for event in scheduler.step():
        told.setdefault(event.request, []).append(event)


def ids_of(events: list[Event]) -> list[int]:
    return [
        event.piece.token for event in events if isinstance(event, Said) and event.piece.token is not None
    ]


def finish_of(events: list[Event]) -> str | None:
    last = events[-1]
    assert isinstance(last, Said)
    return last.piece.finish


def alone(engine: Engine, text: str, options: Options, sampler: SamplerParams | None = None) -> list[Piece]:
    seq = engine.create(sampler)
    engine.feed(seq, engine.tokenizer.encode(text))
    pieces = list(engine.generate(seq, options.max_tokens, options.stop))
    engine.close(seq)
    return pieces


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[dict[int, int]]]:
    """Watches an engine: for each batch, how many tokens each sequence put in."""

    def watch(engine: Engine) -> list[dict[int, int]]:
        batches: list[dict[int, int]] = []
        plan = engine._memory.plan

        def counting(batch: Batch) -> Plan:
            planned = plan(batch)
            batches.append(dict(counts_of(batch)))
            return planned

        monkeypatch.setattr(engine._memory, "plan", counting)
        return batches

    return watch


@pytest.mark.parametrize("max_ubatch", [512, 16, 5])
def test_each_reply_is_what_it_would_be_alone(max_ubatch: int, make_engine: MakeEngine) -> None:
    engine, single = make_engine(max_ubatch=max_ubatch), make_engine()
    scheduler, options = Scheduler(engine), Options(max_tokens=12, stop=("zzz",))
    samplers = [
        SamplerParams(),
        SamplerParams(temperature=0.8, seed=1),
        SamplerParams(),
        SamplerParams(seed=3),
    ]
    names, told = [], dict[RequestId, list[Event]]()
    for text, sampler in zip(TEXTS, samplers, strict=True):
        names.append(scheduler.submit(engine.create(sampler), engine.tokenizer.encode(text), options))
        tell(scheduler, told)  # each comes while the others are under way
    run(scheduler, told)
    for name, text, sampler in zip(names, TEXTS, samplers, strict=True):
        assert ids_of(told[name]) == [piece.token for piece in alone(single, text, options, sampler)]
        assert finish_of(told[name]) in ("length", "eos")


def test_pieces_are_those_of_generate(make_engine: MakeEngine) -> None:
    engine, single = make_engine(), make_engine()
    scheduler, options = Scheduler(engine), Options(max_tokens=20, stop=("e",))
    name = scheduler.submit(engine.create(), engine.tokenizer.encode(TEXTS[0]), options)
    pieces = [event.piece for event in run(scheduler)[name] if isinstance(event, Said)]
    assert pieces == alone(single, TEXTS[0], options)


def test_a_long_prompt_shares_batches_with_the_replies_of_others(
    make_engine: MakeEngine, fixed: Callable[[Engine], list[dict[int, int]]]
) -> None:
    engine = make_engine(max_ubatch=16, max_batch=64)
    scheduler = Scheduler(engine)
    first = engine.create()
    scheduler.submit(first, [5, 6, 7], Options(max_tokens=30))
    scheduler.step()
    scheduler.step()
    batches = fixed(engine)
    second = engine.create()
    scheduler.submit(second, list(range(50)), Options(max_tokens=30))
    for _ in range(5):
        events = scheduler.step()
        assert any(isinstance(event, Said) and event.request == 0 for event in events)
    assert batches == [{first: 1, second: 15}] * 3 + [{first: 1, second: 5}] + [{first: 1, second: 1}]


def test_two_prompts_share_a_batch_in_the_order_they_came(
    make_engine: MakeEngine, fixed: Callable[[Engine], list[dict[int, int]]]
) -> None:
    engine = make_engine(max_ubatch=16)
    batches, scheduler = fixed(engine), Scheduler(engine)
    a, b = engine.create(), engine.create()
    scheduler.submit(a, [1] * 20, Options(max_tokens=1))
    scheduler.submit(b, [2] * 20, Options(max_tokens=1))
    run(scheduler)
    assert batches == [{a: 16}, {a: 4, b: 12}, {b: 8}]


def test_a_known_prefix_is_shared(
    make_engine: MakeEngine, fixed: Callable[[Engine], list[dict[int, int]]]
) -> None:
    engine = make_engine()
    begun(engine, list(range(60)))
    batches, scheduler, seq = fixed(engine), Scheduler(engine), engine.create()
    scheduler.submit(seq, [*range(60), 9, 9], Options(max_tokens=1))
    run(scheduler)
    assert batches == [{seq: 2}]
    assert engine.tokens(seq) == (*range(60), 9, 9)


def test_a_sequence_goes_on_from_its_edge(make_engine: MakeEngine) -> None:
    engine, single = make_engine(), make_engine()
    scheduler = Scheduler(engine)
    for steps in (0, 2):  # from logits, and from a pending token
        seq, other = begun(engine, TEXTS[0], steps=steps), begun(single, TEXTS[0], steps=steps)
        name = scheduler.submit(seq, (), Options(max_tokens=5))
        expected = [piece.token for piece in single.generate(other, 5)]
        assert ids_of(run(scheduler)[name]) == expected
        assert engine.edge(seq) == Pending(expected[-1] or 0)
        engine.close(seq)


def test_a_cancelled_request_keeps_what_it_has_and_the_others_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine(max_ubatch=16)
    scheduler = Scheduler(engine)
    reading, talking, third = engine.create(), engine.create(), engine.create()
    names = [
        scheduler.submit(talking, [1, 2], Options(max_tokens=50)),
        scheduler.submit(reading, list(range(100)), Options(max_tokens=5)),
        scheduler.submit(third, [3, 4], Options(max_tokens=5)),
    ]
    for _ in range(3):
        scheduler.step()
    assert scheduler.cancel(names[1]).piece.finish == "cancelled"
    assert 0 < engine.length(reading) < 100
    assert engine.tokens(reading) == tuple(range(engine.length(reading)))
    assert scheduler.cancel(names[0]).piece == Piece(None, "", "cancelled")
    assert isinstance(engine.edge(talking), Pending)
    told = run(scheduler)
    assert set(told) == {names[2]}
    assert finish_of(told[names[2]]) in ("length", "eos")
    with pytest.raises(EngineError, match="over"):
        scheduler.cancel(names[0])


def test_a_full_context_ends_one_reply_and_harms_no_other(make_engine: MakeEngine) -> None:
    engine, single = make_engine(n_ctx=64), make_engine(n_ctx=64)
    scheduler, options = Scheduler(engine), Options(max_tokens=20)
    full, other = engine.create(), engine.create()
    first = scheduler.submit(full, [1] * 60, Options(max_tokens=20))
    second = scheduler.submit(other, engine.tokenizer.encode("abc"), options)
    told = run(scheduler)
    assert finish_of(told[first]) in ("context", "eos")
    assert finish_of(told[first]) == "eos" or engine.length(full) == 64
    assert ids_of(told[second]) == [piece.token for piece in alone(single, "abc", options)]


def test_damaged_logits_fail_one_request_and_harm_no_other(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, single = make_engine(), make_engine()
    scheduler, options = Scheduler(engine), Options(max_tokens=8)
    bad, good = engine.create(), engine.create()
    names = [
        scheduler.submit(bad, [1, 2, 3]),
        scheduler.submit(good, engine.tokenizer.encode("abc"), options),
    ]

    def damaged(*args: Any) -> Computed:
        found = compute(*args)
        if args[2] is engine._slots and bad in found.logits:
            found.logits[bad] = found.logits[bad] * float("nan")
        return found

    monkeypatch.setattr(stepping, "compute", damaged)
    told = run(scheduler)
    assert isinstance(told[names[0]][-1], Failed)
    assert ids_of(told[names[1]]) == [piece.token for piece in alone(single, "abc", options)]


def test_a_request_without_cells_waits_for_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine(num_cells=256, n_ctx=256, num_seqs=2)
    scheduler = Scheduler(engine)
    first, second = engine.create(), engine.create()
    a = scheduler.submit(first, [1] * 200, Options(max_tokens=5))
    b = scheduler.submit(second, [2] * 100, Options(max_tokens=5))
    told: dict[RequestId, list[Event]] = {}
    while a not in told or finish_of(told[a]) is None:
        tell(scheduler, told)
    assert b not in told
    engine.close(first)  # its rows may give way now
    assert finish_of(run(scheduler)[b]) in ("length", "eos")
    assert engine.tokens(second)[:100] == (2,) * 100


def test_when_none_can_go_on_the_newest_fails(make_engine: MakeEngine) -> None:
    engine = make_engine(num_cells=256, n_ctx=256, num_seqs=3)
    begun(engine, [9] * 200)
    scheduler = Scheduler(engine)
    seqs = [engine.create(), engine.create()]
    names = [scheduler.submit(seq, [seq] * 100) for seq in seqs]
    events = scheduler.step()
    assert [event.request for event in events] == [names[1]]
    assert isinstance(events[0], Failed)
    assert isinstance(events[0].error, NoSlot)
    assert len(scheduler) == 1
    assert engine.tokens(seqs[1]) == ()


def test_what_can_never_be_done_is_refused_when_it_is_asked(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=64)
    scheduler, seq = Scheduler(engine), begun(engine, [1] * 30)
    before = picture(engine, seq)
    with pytest.raises(ContextFull):
        scheduler.submit(seq, [1] * 35)
    with pytest.raises(BatchRefused):
        scheduler.submit(seq, [260])
    with pytest.raises(EngineError, match="empty"):
        scheduler.submit(engine.create(), ())
    scheduler.submit(seq, [1], Options(max_tokens=1))
    with pytest.raises(EngineError, match="already"):
        scheduler.submit(seq, [2])
    assert len(scheduler) == 1
    assert picture(engine, seq) == before


def test_no_tokens_wanted_is_a_prompt_read(engine: Engine) -> None:
    scheduler, seq = Scheduler(engine), engine.create()
    name = scheduler.submit(seq, [1, 2, 3], Options(max_tokens=0))
    assert run(scheduler)[name] == [Said(name, Piece(None, "", "length"))]
    assert engine.tokens(seq) == (1, 2, 3)


def test_nothing_to_do_is_nothing_done(engine: Engine) -> None:
    assert Scheduler(engine).step() == ()


def test_an_error_of_the_machine_leaves_all_requests_as_they_were(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(engine)
    seqs = [engine.create(), engine.create()]
    for seq in seqs:
        scheduler.submit(seq, [1, 2, 3, seq], Options(max_tokens=3))
    before = [picture(engine, seq) for seq in seqs]
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.step()
    assert [picture(engine, seq) for seq in seqs] == before
    assert {finish_of(events) for events in run(scheduler).values()} <= {"length", "eos"}


def test_a_short_prompt_does_not_wait_for_a_long_one_to_end(
    make_engine: MakeEngine, fixed: Callable[[Engine], list[dict[int, int]]]
) -> None:
    engine = make_engine(max_ubatch=16)
    batches, scheduler = fixed(engine), Scheduler(engine)
    long, short = engine.create(), engine.create()
    scheduler.submit(long, [1] * 100, Options(max_tokens=1))
    scheduler.submit(short, [2] * 12, Options(max_tokens=1))
    run(scheduler)
    assert batches[:3] == [{long: 8, short: 8}, {long: 12, short: 4}, {long: 16}]


def test_a_long_prompt_does_not_wait_for_all_the_short_ones_that_come(
    make_engine: MakeEngine, fixed: Callable[[Engine], list[dict[int, int]]]
) -> None:
    engine = make_engine(max_ubatch=16)
    batches, scheduler, long = fixed(engine), Scheduler(engine), engine.create()
    scheduler.submit(long, [1] * 40, Options(max_tokens=1))
    for number in range(5):
        short = engine.create()
        scheduler.submit(short, [number + 2] * 8, Options(max_tokens=0))
        scheduler.step()
        engine.close(short)
    assert [batch[long] for batch in batches] == [8] * 5


def test_beside_replies_prompts_have_only_so_much_room(
    make_engine: MakeEngine, fixed: Callable[[Engine], list[dict[int, int]]]
) -> None:
    engine = make_engine(max_ubatch=64)
    scheduler, talking, reading = Scheduler(engine), engine.create(), engine.create()
    scheduler.submit(talking, [5, 6, 7], Options(max_tokens=30))
    scheduler.step()
    batches = fixed(engine)
    scheduler.submit(reading, [1] * 50, Options(max_tokens=1))
    scheduler.step(most=10)
    scheduler.step()
    assert batches == [{talking: 1, reading: 10}, {talking: 1, reading: 40}]
    assert scheduler.counts.replies == 1


def test_a_prompt_is_read_without_a_reply(engine: Engine) -> None:
    first, seq = begun(engine, list(range(60))), engine.create()
    scheduler = Scheduler(engine)
    name = scheduler.feed(seq, [*range(60), 9, 9])
    assert run(scheduler)[name] == [Read(name, 60, 2, 0)]
    name = scheduler.feed(seq, [1] * 9)
    assert scheduler.stop(name) == Read(name, 0, 0, 0)
    assert engine.tokens(seq) == (*engine.tokens(first), 9, 9)


def test_nothing_is_shared_where_nothing_was_read(engine: Engine) -> None:
    begun(engine, list(range(60)))
    scheduler, seq = Scheduler(engine), engine.create()
    name = scheduler.feed(seq, [*range(60), 9])
    request = scheduler._requests[name]
    scheduler._wanted(name, 5)  # as far as a batch that then finds no room
    assert (request.shared, engine.length(seq)) == (60, 60)
    scheduler.stop(name)
    assert (engine.length(seq), engine.edge(seq)) == (0, None)


def test_who_is_held_takes_part_in_no_batch(engine: Engine) -> None:
    scheduler = Scheduler(engine)
    names = [scheduler.submit(engine.create(), [1, 2, seq], Options(max_tokens=4)) for seq in range(2)]
    scheduler.hold(names[0])
    told = {event.request for _ in range(4) for event in scheduler.step()}
    assert told == {names[1]}
    scheduler.go_on(names[0])
    assert names[0] in run(scheduler)

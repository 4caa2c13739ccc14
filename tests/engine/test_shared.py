"""Many threads use one engine: each hears what it would hear alone, and its own errors, and no others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.batch import Batch, counts_of
from engine.cache.memory import Plan
from engine.driver import Driver
from engine.errors import BatchRefused, ContextFull, EngineError, NoSlot
from engine.reading import FeedResult
from engine.reply import Piece
from engine.runner import Engine
from engine.shared import SharedEngine
from engine.state import NextLogits, Pending, SamplerParams, SeqId
from engine.streams import RUN_AHEAD
from engine.verbs import Verbs
from tests.engine.conftest import MakeEngine
from tests.engine.pictures import picture
from tests.exact.members import open_member

PROMPT = list(range(60))


@pytest.fixture
def share() -> Iterator[Callable[[Engine], SharedEngine]]:
    """Shares engines, and closes their drivers in the end."""
    drivers: list[Driver] = []

    def shared(engine: Engine) -> SharedEngine:
        drivers.append(Driver(engine))
        return SharedEngine(drivers[-1])

    yield shared
    for driver in drivers:
        driver.close()


Share = Callable[[Engine], SharedEngine]


def say(
    engine: Verbs, prompt: Sequence[int], count: int, sampler: SamplerParams | None = None
) -> list[Piece]:
    seq = engine.create(sampler)
    engine.feed(seq, prompt)
    pieces = list(engine.generate(seq, count))
    engine.close(seq)
    return pieces


def at_once(*verbs: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(verbs)) as pool:
        return [future.result(60) for future in [pool.submit(verb) for verb in verbs]]


def slowly(engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.005) -> None:
    """Each pass of the model takes a moment, in which others can come."""
    forward = engine._model.forward

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return forward(*args)

    monkeypatch.setattr(engine._model, "forward", slow)


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """For each batch, how many tokens each sequence put in."""
    batches: list[dict[int, int]] = []
    plan = engine._memory.plan

    def counting(batch: Batch) -> Plan:
        planned = plan(batch)
        batches.append(dict(counts_of(batch)))
        return planned

    monkeypatch.setattr(engine._memory, "plan", counting)
    return batches


def test_replies_of_two_threads_share_batches(
    engine: Engine, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(engine, monkeypatch)
    batches = watch(engine, monkeypatch)
    shared = share(engine)
    at_once(*[lambda number=number: say(shared, [number] * 9, 30) for number in (1, 2)])
    assert sum(len(batch) == 2 for batch in batches) > 15


def test_each_of_many_threads_hears_what_it_would_hear_alone(make_engine: MakeEngine, share: Share) -> None:
    single = make_engine(deterministic=True)
    shared = share(make_engine(deterministic=True, num_seqs=8))
    prompts = [[number, *PROMPT[: 7 * number]] for number in range(1, 9)]
    samplers = [SamplerParams(temperature=0.9, seed=number) for number in range(8)]
    alone = [say(single, prompt, 20, sampler) for prompt, sampler in zip(prompts, samplers, strict=True)]
    asked = zip(prompts, samplers, strict=True)
    heard = at_once(*[lambda of=of: say(shared, of[0], 20, of[1]) for of in asked])
    assert heard == alone


def test_every_verb_does_what_it_does_in_one_thread(make_engine: MakeEngine, share: Share) -> None:
    told = []
    for engine in (make_engine(), share(make_engine())):
        verbs: Verbs = engine
        seq = verbs.create(SamplerParams(seed=4))
        assert verbs.feed(seq, []) == FeedResult(0, 0)
        fed = verbs.feed(seq, PROMPT)
        pieces = list(verbs.generate(seq, 5))
        state = verbs.snapshot(seq)
        other, third = verbs.fork(seq), verbs.restore(state)
        assert state.canary is not None
        assert verbs.canary_drift(third, state.canary) < 1
        verbs.rewind(other, 30)
        verbs.set_pending(other, 7)
        verbs.set_sampler(other, SamplerParams(seed=5))
        verbs.mark(other)
        told.append(
            (
                (fed, pieces, verbs.length(seq), verbs.tokens(other), verbs.edge(other), verbs.spans(third)),
                (verbs.sampler(other), verbs.sampler(third), verbs.known_prefix([*PROMPT, 9, 9])),
                (verbs.last_resumable(seq, 40), verbs.draft_refusal(None), verbs.n_ctx, verbs.model_name),
                (verbs.fingerprint, verbs.drafter, [list(verbs.generate(of, 6)) for of in (seq, third)]),
            )
        )
        woken = verbs.wake(verbs.rest(third))
        assert woken is not None
        verbs.close(woken)
        with pytest.raises(EngineError, match="no live sequence"):
            verbs.tokens(woken)
    assert told[0] == told[1]


def test_what_a_verb_raises_comes_out_where_it_was_called(make_engine: MakeEngine, share: Share) -> None:
    shared = share(make_engine(n_ctx=64, num_seqs=1))
    seq = shared.create()
    with pytest.raises(NoSlot):
        shared.create()
    with pytest.raises(ContextFull):
        shared.feed(seq, [1] * 65)
    with pytest.raises(BatchRefused):
        shared.feed(seq, [100_000])
    with pytest.raises(EngineError, match="empty"):
        next(shared.generate(seq))
    with pytest.raises(EngineError, match="no live sequence"):
        shared.close(SeqId(5))
    assert say(shared, [1, 2], 3) if shared.close(seq) is None else None


def test_progress_is_told_in_the_callers_thread_and_cancel_keeps_what_was_read(
    make_engine: MakeEngine, share: Share
) -> None:
    engine = make_engine(max_batch=16, max_ubatch=16)
    shared, told, here = share(engine), list[tuple[int, int]](), threading.get_ident()

    def progress(done: int, total: int) -> None:
        assert threading.get_ident() == here
        told.append((done, total))

    seq = shared.create()
    assert shared.feed(seq, PROMPT, progress=progress) == FeedResult(0, 60)
    assert told == [(16, 60), (32, 60), (48, 60), (60, 60)]
    other, asked = shared.create(), iter([False, False, True])
    result = shared.feed(other, [7, *PROMPT], cancel=lambda: next(asked))
    assert result == FeedResult(0, 32)
    assert shared.tokens(other) == (7, *PROMPT[:31])
    third = shared.create()
    assert shared.feed(third, PROMPT, cancel=lambda: True) == FeedResult(0, 0)  # nor is anything shared
    assert shared.tokens(third) == ()
    assert shared.edge(third) is None
    assert shared.feed(third, PROMPT) == FeedResult(59, 1)


def test_a_broken_progress_or_cancel_ends_its_own_call(make_engine: MakeEngine, share: Share) -> None:
    engine = make_engine(max_batch=16, max_ubatch=16)
    shared, seq = share(engine), SeqId(0)
    seq = shared.create()
    with pytest.raises(ZeroDivisionError):
        shared.feed(seq, PROMPT, progress=lambda *_: 1 // 0 and None)
    assert 16 <= shared.length(seq) <= 60
    with pytest.raises(ZeroDivisionError):
        list(shared.generate(seq, 5, cancel=lambda: bool(1 // 0)))
    assert say(shared, [1, 2], 3)


@pytest.mark.parametrize("kind", ["whole", "windowed", "recurrent"])
def test_what_was_not_read_of_a_reply_was_not_said(
    kind: str,
    make_engine: MakeEngine,
    windowed_path: Path,
    share: Share,
) -> None:
    def make() -> Engine:
        if kind == "recurrent":
            return open_member("mamba2", "f32", n_ctx=512, num_cells=2048, deterministic=True)
        return make_engine(windowed_path, deterministic=True) if kind == "windowed" else make_engine()

    single, engine = make(), make()
    shared = share(engine)
    expected = [piece.token for piece in say(single, PROMPT, 40)]
    seq = shared.create()
    shared.feed(seq, PROMPT)
    reply = shared.generate(seq, 40)
    heard = [next(reply).token for _ in range(3)]
    time.sleep(0.2)  # the engine runs ahead meanwhile
    reply.close()  # type: ignore[attr-defined]
    assert heard == expected[:3]
    assert shared.tokens(seq) == (*PROMPT, *heard[:2])
    assert shared.edge(seq) == Pending(heard[2] or 0)
    assert [piece.token for piece in shared.generate(seq, 37)] == expected[3:]


def test_an_engine_does_not_run_far_ahead_of_a_slow_reader(
    engine: Engine, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = share(engine)
    batches = watch(engine, monkeypatch)
    seq = shared.create()
    shared.feed(seq, [1, 2, 3])
    reply = shared.generate(seq, 200)
    next(reply)
    time.sleep(0.3)
    assert len(batches) <= RUN_AHEAD + 3
    assert len(say(shared, [4, 5], 30)) == 30  # nor does it keep others waiting
    assert len([1, *reply]) in (200, len(shared.tokens(seq)) - 1)


def test_a_reply_is_cancelled_from_another_thread(
    engine: Engine, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(engine, monkeypatch)
    shared, ended = share(engine), threading.Event()
    seq = shared.create()
    shared.feed(seq, [1, 2, 3])
    threading.Timer(0.1, ended.set).start()
    pieces = list(shared.generate(seq, 400, cancel=ended.is_set))
    assert pieces[-1] == Piece(None, "", "cancelled")
    assert shared.length(seq) == 3 + len(pieces) - 2


def test_a_broken_model_fails_the_call_that_meets_it_and_no_other(
    make_engine: MakeEngine, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, single = make_engine(deterministic=True), make_engine(deterministic=True)
    slowly(engine, monkeypatch)
    forward, shared = engine._model.forward, share(engine)

    def broken(tokens: Any, *args: Any) -> Any:
        if bool((tokens == 13).any()):
            raise RuntimeError("out of registers")
        return forward(tokens, *args)

    monkeypatch.setattr(engine._model, "forward", broken)
    seqs = [shared.create(), shared.create()]

    def meets_it(seq: SeqId) -> None:
        with pytest.raises(EngineError, match="out of registers"):
            shared.feed(seq, [1, 2, 13])

    heard, *_ = at_once(lambda: say(shared, [5, 6, 7], 30), *[lambda of=of: meets_it(of) for of in seqs])
    assert heard == say(single, [5, 6, 7], 30)
    for seq in seqs:
        assert shared.tokens(seq) == ()
        shared.feed(seq, [1, 2])


def test_a_model_that_breaks_in_a_reply_ends_that_reply(
    engine: Engine, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = share(engine)
    seq = shared.create()
    shared.feed(seq, [1, 2, 3])
    reply = shared.generate(seq, 100)
    heard = [next(reply).token]
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            heard.extend(piece.token for piece in reply)
    assert (*shared.tokens(seq)[3:], shared.edge(seq).token) == tuple(heard)  # type: ignore[union-attr]
    assert list(shared.generate(seq, 2))


def test_a_sequence_is_one_threads_while_a_request_is_on_it(
    engine: Engine, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(engine, monkeypatch)
    shared = share(engine)
    seq = shared.create()
    shared.feed(seq, [1, 2, 3])
    reply = shared.generate(seq, 300)
    next(reply)
    for verb in (
        lambda: shared.rewind(seq, 1),
        lambda: shared.set_pending(seq, 1),
        lambda: shared.feed(seq, [1]),
        lambda: next(shared.generate(seq)),
    ):
        with pytest.raises(EngineError, match="request"):
            verb()
    shared.close(seq)
    with pytest.raises(EngineError, match="closed"):
        list(reply)


def test_closing_waits_for_what_is_under_way_and_refuses_the_rest(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(engine, monkeypatch)
    driver = Driver(engine)
    shared = SharedEngine(driver)
    seq = shared.create()
    shared.feed(seq, [1, 2, 3])
    begun = threading.Event()

    def hear() -> int:
        count = 0
        for _ in shared.generate(seq, 40):
            begun.set()
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(hear)
        begun.wait(10)
        driver.close()
        assert heard.result(10) == 40
    for verb in (shared.create, lambda: shared.feed(seq, [1]), driver.close, lambda: shared.snapshot(seq)):
        if verb == driver.close:
            verb()  # nothing more to do
            continue
        with pytest.raises(EngineError, match="closed"):
            verb()


def test_a_reply_that_is_forgotten_is_ended(engine: Engine, share: Share) -> None:
    shared = share(engine)
    seq = shared.create()
    shared.feed(seq, [1, 2, 3])
    first = next(shared.generate(seq, 400)).token
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and shared.edge(seq) != Pending(first or 0):
        time.sleep(0.01)
    assert shared.tokens(seq) == (1, 2, 3)
    assert shared.edge(seq) == Pending(first or 0)


def test_scopes_share_no_rows(engine: Engine) -> None:
    driver = Driver(engine)
    try:
        mine, mine_too, others = (SharedEngine(driver, scope) for scope in ("a", "a", "b"))
        first = mine.create()
        mine.feed(first, PROMPT)
        assert mine_too.known_prefix([*PROMPT, 9]) == 60
        assert others.known_prefix([*PROMPT, 9]) == 0
        state = mine.snapshot(first)
        seq = others.create()
        assert others.feed(seq, [*PROMPT, 9]) == FeedResult(0, 61)
        copy, fork = others.restore(state), mine.fork(first)
        mine.close(first)
        mine.rest(fork)
        for each in (seq, copy):
            others.close(each)
        assert mine_too.feed(mine_too.create(), [*PROMPT, 9]) == FeedResult(60, 1)
        assert SharedEngine(driver).known_prefix([*PROMPT, 9]) == 0
        assert SharedEngine(driver, "c").known_prefix([*PROMPT, 9]) == 0
    finally:
        driver.close()


def test_a_resting_sequence_wakes_as_it_was_or_is_gone(make_engine: MakeEngine, share: Share) -> None:
    engine, single = make_engine(num_seqs=2), make_engine()
    shared = share(engine)
    expected = say(single, PROMPT, 12)
    seq = shared.create()
    shared.feed(seq, PROMPT)
    heard = list(shared.generate(seq, 5))
    before = picture(engine, seq)
    resting = shared.rest(seq)
    with pytest.raises(EngineError, match="no live sequence"):
        shared.length(seq)
    woken = shared.wake(resting)
    assert woken is not None
    assert picture(engine, woken) == before
    assert [piece.token for piece in (*heard, *shared.generate(woken, 7))] == [
        piece.token for piece in expected
    ]
    assert shared.wake(resting) is None  # it rests no more
    resting = shared.rest(woken)
    for number in range(3):  # there is room for two, and one more that is idle
        say(shared, [number + 1] * 5, 2)
    assert shared.wake(resting) is None


def test_what_rests_gives_way_before_anyone_is_refused(make_engine: MakeEngine, share: Share) -> None:
    shared = share(make_engine(num_cells=256, n_ctx=256, num_seqs=2))
    seq = shared.create()
    shared.feed(seq, [1] * 200)
    resting = shared.rest(seq)
    other = shared.create()
    assert shared.feed(other, [2] * 100).computed == 100
    assert shared.wake(resting) is None


def test_waking_needs_a_place_among_the_living(make_engine: MakeEngine, share: Share) -> None:
    shared = share(make_engine(num_seqs=1))
    seq = shared.create()
    shared.feed(seq, PROMPT)
    resting = shared.rest(seq)
    other = shared.create()
    with pytest.raises(NoSlot):
        shared.wake(resting)
    shared.close(other)
    woken = shared.wake(resting)
    assert woken is not None
    assert isinstance(shared.edge(woken), NextLogits)

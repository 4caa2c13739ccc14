"""Continuous batching: many requests, each on a sequence of its own, go through the engine together.

Every step is one batch: the next token of each reply with what a drafter guesses to follow it, and with the
room that is left a piece of the prompts that wait. So a long prompt never stops the replies of others, and a
reply never waits for others to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from engine.errors import ContextFull, EngineError, NoSlot
from engine.reply import Finish, Piece, Reply
from engine.runner import Engine
from engine.speculative.speculation import Step
from engine.state import Pending, SeqId

RequestId = NewType("RequestId", int)


@dataclass(frozen=True, slots=True)
class Options:
    """When a reply ends by itself; how it is sampled is its sequence's own."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """The next piece of a request's reply; after one with a `finish` the request is over."""

    request: RequestId
    piece: Piece


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended by an error of its own. Its sequence is as it was before the step."""

    request: RequestId
    error: EngineError


Event = Said | Failed


@dataclass(slots=True)
class Request:
    """`rest` of the prompt is not fed yet; when it is empty the reply is under way."""

    seq: SeqId
    rest: tuple[int, ...]
    reply: Reply


class Scheduler:
    """Requests in, events out. Sequences belong to who submits them: they stay open when a request ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: dict[RequestId, Request] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many requests are not over."""
        return len(self._requests)

    def submit(self, seq: SeqId, tokens: Sequence[int], options: Options | None = None) -> RequestId:
        """Feed `tokens` after those of `seq` (as `Engine.feed` does), then reply; nothing is computed yet.

        Without tokens the reply goes on from where the sequence is. Raises ContextFull, BatchRefused, and
        EngineError for a sequence that has a request already or has nothing to go on from.
        """
        if any(request.seq == seq for request in self._requests.values()):
            raise EngineError(f"sequence {seq} has a request already")
        self._engine.check_ids(tokens)
        self._engine.check_room(seq, len(tokens))
        if not tokens and self._engine.edge(seq) is None:
            raise EngineError(f"sequence {seq} is empty: there is nothing to go on from")
        options = options or Options()
        reply = Reply(self._engine.tokenizer, options.stop, options.max_tokens)
        name = RequestId(self._count)
        self._count += 1
        self._requests[name] = Request(seq, tuple(tokens), reply)
        return name

    def cancel(self, request: RequestId) -> Said:
        """End a request; what was fed and sampled stays. Returns its last piece.
        Raises EngineError for one that is over."""
        if request not in self._requests:
            raise EngineError(f"request {request} is over, or never was")
        return self._end(request, "cancelled")

    def step(self) -> tuple[Event, ...]:
        """Compute one batch; what came of it. An error in one request harms no other.

        A request that finds no cells waits while others go on; when none can, the newest fails.
        """
        events: list[Event] = []
        work = self._work()
        for name, step in self._advance(work, events).items():
            request = self._requests[name]
            request.rest = request.rest[len(work[name]) :] if request.rest else ()
            if not request.rest:
                events += self._next_pieces(name, request, step)
        return tuple(events)

    def _work(self) -> dict[RequestId, tuple[int, ...]]:
        """What each request puts into the next batch: first tokens of replies, then pieces of prompts."""
        work: dict[RequestId, tuple[int, ...]] = {}
        room = self._engine.config.max_ubatch
        for name, request in self._requests.items():
            if not request.rest and room:
                edge = self._engine.edge(request.seq)
                goes_on = request.reply.ended is None
                work[name] = (edge.token,) if goes_on and isinstance(edge, Pending) else ()
                room -= len(work[name])
        for name, request in self._requests.items():
            if request.rest and room:
                request.rest = request.rest[self._engine.share(request.seq, request.rest) :]
                work[name] = request.rest[: min(room, self._engine.stride(request.seq))]
                room -= len(work[name])
        return work

    def _guesses(self, work: dict[RequestId, tuple[int, ...]]) -> dict[SeqId, tuple[int, ...]]:
        """What may follow the tokens of replies, as far as the batch has room for it."""
        room = self._engine.config.max_ubatch - sum(map(len, work.values()))
        guesses = {}
        for name in work:
            request = self._requests[name]
            if room > 0 and not request.rest and work[name]:
                found = self._engine.propose(request.seq, request.reply.left)[:room]
                guesses[request.seq] = found
                room -= len(found)
        return guesses

    def _advance(self, work: dict[RequestId, tuple[int, ...]], events: list[Event]) -> dict[RequestId, Step]:
        """Feed `work` and what may follow it as one batch, or else one by one. Returns the requests that went
        on, and what was sampled for them already."""
        try:
            steps = self._engine.advance(
                {self._requests[name].seq: tokens for name, tokens in work.items()}, self._guesses(work)
            )
            return {name: steps.get(self._requests[name].seq, Step(())) for name in work}
        except EngineError:  # nothing was fed: find out whose error it is
            done: dict[RequestId, Step] = {}
            waiting = {}
            for name, tokens in work.items():
                try:
                    self._engine.advance({self._requests[name].seq: tokens})
                    done[name] = Step(())
                except ContextFull:
                    events.append(self._end(name, "context"))
                except NoSlot as error:
                    waiting[name] = error
                except EngineError as error:
                    events.append(self._fail(name, error))
            if waiting and not done and not events:
                newest = max(waiting)
                events.append(self._fail(newest, waiting[newest]))
            return done

    def _next_pieces(self, name: RequestId, request: Request, step: Step) -> list[Event]:
        if request.reply.ended is not None:  # no token was asked for
            return [self._end(name, request.reply.ended)]
        try:
            tokens = step.tokens or (self._engine.choose(request.seq),)
        except EngineError as error:
            return [self._fail(name, error)]
        events: list[Event] = []
        for index, token in enumerate(tokens, start=1):
            piece = request.reply.push(token)
            events.append(Said(name, piece))
            if piece.finish is not None:
                del self._requests[name]
                self._engine.unsay(request.seq, len(tokens) - index)
                break
        return events

    def _end(self, name: RequestId, finish: Finish) -> Said:
        return Said(name, self._requests.pop(name).reply.end(finish))

    def _fail(self, name: RequestId, error: EngineError) -> Failed:
        del self._requests[name]
        return Failed(name, error)

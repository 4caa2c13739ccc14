"""Continuous batching: many requests, each on a sequence of its own, go through the engine together.

Every step is one batch: the next token of each reply with what a drafter guesses to follow it, and with the
room that is left a piece of the prompts that wait. So a long prompt never stops the replies of others, and a
reply never waits for others to end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NewType

from engine.chooser import Chooser
from engine.errors import ContextFull, EngineError, NoSlot
from engine.reply import Finish, Piece, Reply
from engine.runner import Engine
from engine.speculative.speculation import Step
from engine.state import Edge, Pending, SeqId

RequestId = NewType("RequestId", int)


@dataclass(frozen=True, slots=True)
class Options:
    """When a reply ends by itself; how it is sampled is its sequence's own. A `chooser` is of one reply."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    chooser: Chooser | None = None


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


@dataclass(frozen=True, slots=True)
class Read:
    """How far a request without a reply is: of its tokens `shared` had rows in memory already, `computed`
    were read, and `left` are to be. With none left it is over."""

    request: RequestId
    shared: int
    computed: int
    left: int


Event = Said | Failed | Read


@dataclass(slots=True)
class Request:
    """`rest` of the prompt is not fed yet; when it is empty the `reply` is under way, if there is to be one.
    `edge` is what followed the sequence before. One that is `held` takes part in no batch."""

    seq: SeqId
    rest: tuple[int, ...]
    reply: Reply | None
    edge: Edge
    chooser: Chooser | None = None
    shared: int = 0
    computed: int = 0
    held: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a batch: those of prompts, and those of replies with the guesses at them."""

    prompts: int = 0
    replies: int = 0


class Scheduler:
    """Requests in, events out. Sequences belong to who submits them: they stay open when a request ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: dict[RequestId, Request] = {}
        self._count = 0
        self.counts = Counts()

    def __len__(self) -> int:
        """How many requests are not over."""
        return len(self._requests)

    @property
    def ready(self) -> tuple[RequestId, ...]:
        """The requests that take part in the next batch, if it has room for all."""
        return tuple(name for name, request in self._requests.items() if not request.held)

    @property
    def num_replies(self) -> int:
        """How many of those are past their prompts."""
        return sum(not request.rest and not request.held for request in self._requests.values())

    def submit(self, seq: SeqId, tokens: Sequence[int], options: Options | None = None) -> RequestId:
        """Feed `tokens` after those of `seq` (as `Engine.feed` does), then reply; nothing is computed yet.

        Without tokens the reply goes on from where the sequence is. Raises ContextFull, BatchRefused, and
        EngineError for a sequence that has a request already or has nothing to go on from.
        """
        self._check(seq, tokens)
        if not tokens and self._engine.edge(seq) is None:
            raise EngineError(f"sequence {seq} is empty: there is nothing to go on from")
        options = options or Options()
        reply = Reply(self._engine.tokenizer, options.stop, options.max_tokens)
        return self._add(seq, tokens, reply, options.chooser)

    def feed(self, seq: SeqId, tokens: Sequence[int]) -> RequestId:
        """Read `tokens`, at least one, after those of `seq` (as `Engine.feed` does), and no more. Raises
        ContextFull, BatchRefused, and EngineError for a sequence that has a request already."""
        self._check(seq, tokens)
        return self._add(seq, tokens, None)

    def only_reads(self, request: RequestId) -> bool:
        """Whether it has no reply."""
        return self._known(request).reply is None

    def hold(self, request: RequestId) -> None:
        """Let no batch have anything of it, until `go_on`."""
        self._requests[request].held = True

    def go_on(self, request: RequestId) -> None:
        self._requests[request].held = False

    def cancel(self, request: RequestId) -> Said:
        """End a request; what was fed and sampled stays. Returns its last piece.
        Raises EngineError for one that is over."""
        reply = self._known(request).reply
        if reply is None:
            raise EngineError(f"request {request} only reads: it has no reply")
        return self._end(request, reply, "cancelled")

    def stop(self, request: RequestId) -> Read:
        """End a request that only reads; what was read stays. Raises EngineError for one that is over."""
        found = self._known(request)
        del self._requests[request]
        self._forget_shared(found)
        return Read(request, found.shared, found.computed, 0)

    def drop(self, request: RequestId) -> None:
        """End a request that an error of the machine's was met with; what was fed and sampled stays. Raises
        EngineError for one that is over."""
        found = self._known(request)
        del self._requests[request]
        self._forget_shared(found)

    def step(self, only: Collection[RequestId] | None = None, most: int | None = None) -> tuple[Event, ...]:
        """Compute one batch, of `only` these requests or of all that are ready; what came of it. An error in
        one request harms no other. Beside replies no more than `most` tokens of prompts are read.

        A request that finds no cells waits while others go on; when none can, the newest fails.
        """
        events: list[Event] = []
        names = [name for name in self.ready if only is None or name in only]
        work = self._work(names, most)
        for name, step in self._advance(work, events).items():
            request, tokens = self._requests[name], work[name]
            if request.rest:
                request.computed += len(tokens)
                request.rest = request.rest[len(tokens) :]
            if request.reply is None:
                events.append(self._read(name, request))
            elif not request.rest:
                events += self._next_pieces(name, request, request.reply, step)
        return tuple(events)

    def _work(self, names: Sequence[RequestId], most: int | None) -> dict[RequestId, tuple[int, ...]]:
        """What each request puts into the next batch: first tokens of replies, then pieces of prompts."""
        work: dict[RequestId, tuple[int, ...]] = {}
        room = self._engine.config.max_ubatch
        for name in names:
            request = self._requests[name]
            if not request.rest and request.reply is not None and room:
                edge = self._engine.edge(request.seq)
                goes_on = request.reply.ended is None
                work[name] = (edge.token,) if goes_on and isinstance(edge, Pending) else ()
                room -= len(work[name])
        replies = sum(map(len, work.values()))
        if replies and most is not None:
            room = min(room, most)
        prompts = [name for name in names if self._requests[name].rest]
        for name, count in self._allotted(prompts, room).items():
            work[name] = self._requests[name].rest[:count]
        self.counts = Counts(sum(map(len, work.values())) - replies, replies)
        return work

    def _allotted(self, prompts: Sequence[RequestId], room: int) -> dict[RequestId, int]:
        """How much of the room each prompt has. Those that end soonest come first, so that a short one does
        not wait for a long one; but half of it is the oldest's, so that none waits for ever."""
        if not room or not prompts:
            return {}
        oldest, *others = prompts
        counts = {oldest: self._wanted(oldest, room)}
        others.sort(key=self._left)
        shorter = others and self._left(others[0]) < self._left(oldest)
        left = room - min(counts[oldest], (room + 1) // 2 if shorter else room)
        for name in others:
            if left:
                counts[name] = self._wanted(name, left)
                left -= counts[name]
        counts[oldest] = min(counts[oldest], room - sum(counts[name] for name in others if name in counts))
        return counts

    def _left(self, name: RequestId) -> int:
        return len(self._requests[name].rest)

    def _wanted(self, name: RequestId, at_most: int) -> int:
        """How much of its prompt a request can put into a batch, once it shares what is known already."""
        request = self._requests[name]
        shared = self._engine.share(request.seq, request.rest)
        request.shared += shared
        request.rest = request.rest[shared:]
        return min(len(request.rest), at_most, self._engine.stride(request.seq))

    def _guesses(self, work: dict[RequestId, tuple[int, ...]]) -> dict[SeqId, tuple[int, ...]]:
        """What may follow the tokens of replies, as far as the batch has room for it."""
        room = self._engine.config.max_ubatch - sum(map(len, work.values()))
        guesses = {}
        for name in work:
            request = self._requests[name]
            if request.chooser is not None or request.reply is None:
                continue
            if room > 0 and not request.rest and work[name]:
                found = self._engine.propose(request.seq, request.reply.left)[:room]
                guesses[request.seq] = found
                room -= len(found)
        self.counts = Counts(self.counts.prompts, self.counts.replies + sum(map(len, guesses.values())))
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
                except ContextFull as error:
                    events.append(self._full(name, error))
                except NoSlot as error:
                    waiting[name] = error
                except EngineError as error:
                    events.append(self._fail(name, error))
                except Exception as error:  # those before it were fed, so it must not keep them from hearing
                    events.append(self._fail(name, machine_error(error)))
            if waiting and not done and not events:
                newest = max(waiting)
                events.append(self._fail(newest, waiting[newest]))
            return done

    def _next_pieces(self, name: RequestId, request: Request, reply: Reply, step: Step) -> list[Event]:
        if reply.ended is not None:  # no token was asked for
            return [self._end(name, reply, reply.ended)]
        try:
            told = None
            if request.chooser is None:
                tokens = step.tokens or (self._engine.choose(request.seq),)
            else:
                token, told = request.chooser.choose(self._engine, request.seq)
                tokens = (token,)
        except EngineError as error:
            return [self._fail(name, error)]
        events: list[Event] = []
        for index, token in enumerate(tokens, start=1):
            piece = reply.push(token, told)
            events.append(Said(name, piece))
            if piece.finish is not None:
                del self._requests[name]
                self._engine.unsay(request.seq, len(tokens) - index)
                break
        return events

    def _read(self, name: RequestId, request: Request) -> Read:
        if not request.rest:
            del self._requests[name]
        return Read(name, request.shared, request.computed, len(request.rest))

    def _full(self, name: RequestId, error: ContextFull) -> Event:
        reply = self._requests[name].reply
        return self._fail(name, error) if reply is None else self._end(name, reply, "context")

    def _end(self, name: RequestId, reply: Reply, finish: Finish) -> Said:
        del self._requests[name]
        return Said(name, reply.end(finish))

    def _fail(self, name: RequestId, error: EngineError) -> Failed:
        self._forget_shared(self._requests.pop(name))
        return Failed(name, error)

    def _forget_shared(self, request: Request) -> None:
        """Nothing is shared where nothing was read."""
        if request.shared and not request.computed:
            self._engine.unshare(request.seq, request.edge)
            request.shared = 0

    def _known(self, name: RequestId) -> Request:
        if name not in self._requests:
            raise EngineError(f"request {name} is over, or never was")
        return self._requests[name]

    def _check(self, seq: SeqId, tokens: Sequence[int]) -> None:
        if any(request.seq == seq for request in self._requests.values()):
            raise EngineError(f"sequence {seq} has a request already")
        self._engine.check_ids(tokens)
        self._engine.check_room(seq, len(tokens))

    def _add(
        self, seq: SeqId, tokens: Sequence[int], reply: Reply | None, chooser: Chooser | None = None
    ) -> RequestId:
        name = RequestId(self._count)
        self._count += 1
        self._requests[name] = Request(seq, tuple(tokens), reply, self._engine.edge(seq), chooser)
        return name


def machine_error(error: Exception) -> EngineError:
    """An error that is none of ours, for whoever asked for what it was met with."""
    told = EngineError(f"the model could not be computed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told

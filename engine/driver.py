"""`Driver`: the one thread that an engine is used by, for all that want to."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import EngineError
from engine.generation import Cancel
from engine.pace import Pace
from engine.runner import Engine
from engine.scheduler import Event, Failed, Options, Read, RequestId, Said, Scheduler, machine_error
from engine.state import SeqId
from engine.streams import Item, Items, Stream

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Job:
    """Something to do between two batches; one of both is called, once."""

    run: Callable[[], None]
    refuse: Callable[[EngineError], None]


class Driver:
    """Carries out verbs of any thread between two batches, and computes batches while there are requests.

    What a verb raises comes out where it was called. An error of the machine's in a batch (a model that is
    broken, no memory) ends the requests that meet it when they are computed alone, and no other. After
    `close` every verb raises EngineError.
    """

    def __init__(self, engine: Engine) -> None:
        """`engine` is the driver's from now on: nobody else may call what changes it."""
        self.engine = engine
        self.pace = Pace()
        self._scheduler = Scheduler(engine)
        self._streams: dict[RequestId, Stream] = {}
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._closing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, verb: Callable[[Engine], Result]) -> Result:
        """What `verb` returns or raises, between two batches."""
        return self._ask(lambda: verb(self.engine))

    def edit(self, seq: SeqId, verb: Callable[[Engine], Result]) -> Result:
        """As `call`, of a verb that changes `seq`. Raises EngineError while a request is on it."""

        def checked() -> Result:
            if any(stream.seq == seq for stream in self._streams.values()):
                raise EngineError(f"sequence {seq} has a request under way")
            return verb(self.engine)

        return self._ask(checked)

    def let_go(self, seq: SeqId, verb: Callable[[Engine], Result]) -> Result:
        """As `call`, of a verb that gives `seq` up: a request on it ends first."""

        def freed() -> Result:
            for stream in [stream for stream in self._streams.values() if stream.seq == seq]:
                self._scheduler.drop(stream.request)
                self._finish(stream, EngineError(f"sequence {seq} was closed"))
            return verb(self.engine)

        return self._ask(freed)

    def feed(self, seq: SeqId, tokens: Sequence[int], cancel: Cancel | None) -> Stream:
        """Begin to read `tokens`. Raises as `Scheduler.feed`."""
        items: Items = queue.SimpleQueue()
        return self._ask(lambda: self._begin(seq, self._scheduler.feed(seq, tokens), cancel, items, 0))

    def reply(
        self, seq: SeqId, options: Options, cancel: Cancel | None, items: Items, number: int = 0
    ) -> Stream:
        """Begin a reply, whose pieces come with `number` into `items`. Raises as `Scheduler.submit`."""
        return self._ask(
            lambda: self._begin(seq, self._scheduler.submit(seq, (), options), cancel, items, number)
        )

    def was_read(self, stream: Stream) -> None:
        """Something was taken from the stream."""
        if stream.held and stream.caught_up:
            self._post(Job(lambda: self._go_on(stream), lambda _: None))

    def end(self, stream: Stream) -> None:
        """The reader reads no more: end its request, and take back what it was not told."""
        if threading.current_thread() is self._thread:  # a generator that is collected as garbage, just here
            self._post(Job(lambda: self._take_back(stream), lambda _: None))
        else:
            self._ask(lambda: self._take_back(stream))

    def close(self) -> None:
        """Take no more requests, wait for those under way, and end the thread. The engine stays as it is."""
        self._closing = True
        self._jobs.put(Job(lambda: None, lambda _: None))
        self._thread.join()

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._do_jobs():
                self._ask_who_cancels()
                if self._scheduler.ready:
                    self._compute()
        finally:
            self._leave()

    def _do_jobs(self) -> bool:
        """Do all that is to be done now; with nothing else to do, wait for it. False at the end."""
        if not self._scheduler.ready:
            if self._closing and not self._streams and self._jobs.empty():
                return False
            self._jobs.get().run()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return True
            job.run()

    def _compute(self) -> None:
        most = self.pace.most(self._scheduler.num_replies)
        started = time.perf_counter()
        try:
            events = self._scheduler.step(most=most)
        except Exception:  # whose error is it? Nothing was changed by it
            for name in self._scheduler.ready:
                self._compute_alone(name)
            return
        self.pace.add(self._scheduler.counts, time.perf_counter() - started)
        self._tell(events)

    def _compute_alone(self, name: RequestId) -> None:
        try:
            events = self._scheduler.step(only=(name,))
        except Exception as error:
            self._drop(self._streams[name], machine_error(error))
        else:
            self._tell(events)

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            stream = self._streams[event.request]
            match event:
                case Said(_, piece):
                    stream.over = piece.finish is not None
                    stream.add(piece)
                case Read():
                    stream.over = not event.left
                    stream.add(event)
                case Failed(_, error):
                    stream.over = True
                    stream.add(error)
            if stream.over:
                del self._streams[event.request]
            elif stream.behind and not stream.held:
                stream.held = True
                self._scheduler.hold(event.request)
                if stream.caught_up:  # before it could see that it is waited for
                    self._go_on(stream)

    def _ask_who_cancels(self) -> None:
        for stream in list(self._streams.values()):
            try:
                cancelled = stream.cancel is not None and stream.cancel()
            except BaseException as error:  # its own, and nobody else's
                self._drop(stream, error)
                continue
            if cancelled:
                self._cancel(stream)

    def _cancel(self, stream: Stream) -> None:
        if self._scheduler.only_reads(stream.request):
            self._finish(stream, self._scheduler.stop(stream.request))
        else:
            self._finish(stream, self._scheduler.cancel(stream.request).piece)

    def _drop(self, stream: Stream, error: BaseException) -> None:
        self._scheduler.drop(stream.request)
        self._finish(stream, error)

    def _finish(self, stream: Stream, item: Item) -> None:
        del self._streams[stream.request]
        stream.over = True
        stream.add(item)

    def _begin(
        self, seq: SeqId, request: RequestId, cancel: Cancel | None, items: Items, number: int
    ) -> Stream:
        if self._closing:
            self._scheduler.drop(request)
            raise closed()
        stream = self._streams[request] = Stream(seq, request, cancel, items, number)
        return stream

    def _go_on(self, stream: Stream) -> None:
        if stream.held and not stream.over:
            stream.held = False
            self._scheduler.go_on(stream.request)

    def _take_back(self, stream: Stream) -> None:
        if not stream.over:
            self._scheduler.drop(stream.request)
            del self._streams[stream.request]
            stream.over = True
        self.engine.unsay(stream.seq, stream.sampled - stream.heard)

    def _leave(self) -> None:
        """Nobody waits for a thread that is gone, whatever ended it."""
        self._closed = True
        for stream in list(self._streams.values()):
            self._finish(stream, closed())
        self._refuse_all()

    # --- in others' threads -------------------------------------------------------------------

    def _post(self, job: Job) -> None:
        """No lock is taken: it can be asked anywhere, also where garbage is collected."""
        self._jobs.put(job)
        if self._closed:  # the thread may be gone without having seen it
            self._refuse_all()

    def _refuse_all(self) -> None:
        while True:
            try:
                self._jobs.get_nowait().refuse(closed())
            except queue.Empty:
                return

    def _ask(self, verb: Callable[[], Result]) -> Result:
        answer: Future[Result] = Future()

        def job() -> None:
            try:
                answer.set_result(verb())
            except BaseException as error:
                answer.set_exception(error)

        self._post(Job(job, answer.set_exception))
        return answer.result()


def closed() -> EngineError:
    return EngineError("the engine was closed")

"""Ranks as threads of this process: the very code of rank 0 and of the others, without processes to start."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import RankLost
from engine.parallel.follower import follow
from engine.parallel.lead import Lead
from engine.parallel.share import Share
from engine.parallel.world import World
from engine.runner import Engine
from tests.oracles import base

#: Seconds after which a rank that does not come is lost.
PATIENCE = 60


class Hub:
    """What the ranks of one model share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.terms: list[torch.Tensor | None] = [None] * size
        self.words: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(size)]
        self.given: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }


class ThreadGroup:
    """See `engine.parallel.group.Group`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._share = Share(rank, hub.size)
        self.num_totals = 0
        self._broken: str | None = None

    @property
    def share(self) -> Share:
        return self._share

    def total(self, x: torch.Tensor) -> torch.Tensor:
        self._hub.terms[self._share.rank] = x
        self._wait()
        terms = [term for term in self._hub.terms if term is not None]
        assert len({(term.shape, term.dtype) for term in terms}) == 1, "ranks add up different things"
        self._wait()
        self.num_totals += 1
        out = terms[0].float()
        for term in terms[1:]:
            out = out + term.float()
        return out

    def tell(self, message: bytes) -> None:
        self._whole()
        for words in self._hub.words[1:]:
            words.put(message)

    def hear(self) -> bytes:
        word = self._hub.words[self._share.rank].get()
        if word is None:
            raise RankLost("rank 0 is gone")
        return word

    def give(self, tensor: torch.Tensor, rank: int) -> None:
        if tensor.numel():
            self._hub.given[self._share.rank, rank].put(tensor.clone())

    def take(self, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=torch.uint8)
        taken = self._hub.given[rank, self._share.rank].get(timeout=PATIENCE)
        assert taken.shape == shape
        return taken

    def meet(self) -> None:
        self._wait()

    def close(self, why: str) -> None:
        self._broken = self._broken or why
        self._hub.barrier.abort()
        for words in self._hub.words:
            words.put(None)

    def _whole(self) -> None:
        if self._broken is not None:
            raise RankLost(f"the model is no longer whole: {self._broken}")

    def _wait(self) -> None:
        self._whole()
        try:
            self._hub.barrier.wait()
        except threading.BrokenBarrierError as error:
            self.close("a rank does not answer")
            raise RankLost(f"the model is no longer whole: {self._broken}") from error


@contextmanager
def divided(folder: Path, size: int, **settings: Any) -> Iterator[Engine]:
    """An engine of `size` ranks, let go in the end."""
    hub = Hub(size)

    def run(rank: int) -> None:
        group = ThreadGroup(hub, rank)
        try:
            follow(group, rank)
        except RankLost:
            pass
        except BaseException:
            group.close("it broke")
            raise

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, size)]

    def lead(_: int, __: World | None) -> Lead:
        return Lead(ThreadGroup(hub, 0))

    for thread in threads:
        thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.loader.lead", lead)
        engine = base.open_engine(folder, tp=size, **settings)
    try:
        yield engine
    finally:
        engine.end()
        for thread in threads:
            thread.join()

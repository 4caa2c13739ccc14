"""Ranks as threads of this process: the very code of rank 0 and of the others, without processes to start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import pytest
import torch

from engine.errors import RankLost
from engine.parallel.follower import follow
from engine.parallel.lead import Lead
from engine.parallel.share import Share
from engine.parallel.world import World
from engine.runner import Engine
from tests.oracles import base

Thing = TypeVar("Thing")

#: Seconds after which a rank that does not answer is lost.
PATIENCE = 60


class Hub:
    """A queue of tensors from each rank to each, and one of words from rank 0. None: who sent it has left."""

    def __init__(self, size: int) -> None:
        ranks = range(size)
        self.size = size
        self.tensors: dict[tuple[int, int], SimpleQueue[torch.Tensor | None]] = {
            (a, b): SimpleQueue() for a in ranks for b in ranks
        }
        self.words: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in ranks]


class ThreadGroup:
    """See `engine.parallel.group.Group`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._share = Share(rank, hub.size)
        self._broken: str | None = None
        self.num_totals = 0

    @property
    def share(self) -> Share:
        return self._share

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._hub.size) if rank != self._share.rank]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        for rank in self._others:
            self._put(x, rank)
        terms = {rank: self._get(rank) for rank in self._others} | {self._share.rank: x}
        assert len({(term.shape, term.dtype) for term in terms.values()}) == 1, "ranks add different things"
        self.num_totals += 1
        out = terms[0].float()
        for rank in range(1, self._hub.size):
            out = out + terms[rank].float()
        return out

    def tell(self, message: bytes) -> None:
        self._whole()
        for rank in self._others:
            self._hub.words[rank].put(message)

    def hear(self) -> bytes:
        self._whole()
        word = self._hub.words[self._share.rank].get()
        return self._there(word)

    def give(self, tensor: torch.Tensor, rank: int) -> None:
        if tensor.numel():
            self._put(tensor.clone(), rank)

    def take(self, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=torch.uint8)
        taken = self._get(rank)
        assert taken.shape == shape
        return taken

    def meet(self) -> None:
        self.total(torch.zeros(1))
        self.num_totals -= 1

    def close(self, why: str) -> None:
        self._broken = self._broken or why
        for rank in self._others:
            self._hub.tensors[self._share.rank, rank].put(None)
            if self._share.rank == 0:
                self._hub.words[rank].put(None)

    def _put(self, tensor: torch.Tensor, rank: int) -> None:
        self._whole()
        self._hub.tensors[self._share.rank, rank].put(tensor)

    def _get(self, rank: int) -> torch.Tensor:
        self._whole()
        try:
            return self._there(self._hub.tensors[rank, self._share.rank].get(timeout=PATIENCE))
        except Empty:
            return self._there(None)

    def _there(self, thing: Thing | None) -> Thing:
        if thing is None:
            self.close("a rank does not answer")
        self._whole()
        assert thing is not None
        return thing

    def _whole(self) -> None:
        if self._broken is not None:
            raise RankLost(f"the model is no longer whole: {self._broken}")


@contextmanager
def threads_as_ranks(size: int) -> Iterator[None]:
    """Within it, a model that is loaded for `size` ranks has threads for the others. One at most."""
    hub = Hub(size)

    def run(rank: int) -> None:
        group = ThreadGroup(hub, rank)
        with suppress(RankLost):
            try:
                follow(group, rank)
            finally:
                group.close("it is over")

    def lead(_: int, __: World | None) -> Lead:
        return Lead(ThreadGroup(hub, 0))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.loader.lead", lead)
            yield
    finally:
        ThreadGroup(hub, 0).close("it is over")
        for thread in threads:
            thread.join()


@contextmanager
def divided(folder: Path, size: int, **settings: Any) -> Iterator[Engine]:
    """An engine of `size` ranks, let go in the end."""
    with threads_as_ranks(size):
        engine = base.open_engine(folder, tp=size, **settings)
        try:
            yield engine
        finally:
            engine.end()

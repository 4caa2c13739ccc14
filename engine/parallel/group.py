"""Processes that hold one model together, over torch.distributed: gloo, or NCCL between GPUs.

There are three channels. In the middle of a pass every rank waits for the others, and one that does not come
in time is lost. Between passes the others wait for rank 0's word as long as it takes: a user may think for
hours, and a connection that closes ends the wait at once; but they take it at once, and rank 0 waits for that
no longer than in a pass. And where some may still be loading all meet, however long that takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from engine.errors import ConfigError, RankLost
from engine.parallel.ranks import Ranks
from engine.parallel.share import Share

#: Within a pass: what the slowest layer of the slowest rank may take.
PATIENCE = timedelta(seconds=120)
#: For the others to come at all; under torchrun rank 0 may have to fetch the model first.
JOINING = timedelta(minutes=30)
_FOREVER = timedelta(days=365)
#: Bytes of a first frame: nearly every message fits into one. Its first eight are the message's length.
FRAME = 1024
_HEAD = 8


class Group(Ranks, Protocol):
    """Ranks, and what rank 0 has to say to the others. All raise RankLost, and so from then on."""

    @property
    def num_totals(self) -> int:
        """How many there have been."""
        ...

    def tell(self, message: bytes) -> None:
        """Rank 0 to all others."""
        ...

    def hear(self) -> bytes:
        """What rank 0 tells; waits until it does."""
        ...

    def give(self, tensor: torch.Tensor, rank: int) -> None:
        """Send uint8 `tensor` to `rank`, which takes it."""
        ...

    def take(self, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        """The uint8 tensor of that shape which `rank` gives."""
        ...

    def meet(self) -> None:
        """Wait until all are here, however long they load."""
        ...

    def close(self, why: str) -> None:
        """Leave: the others notice, and nothing more can be asked. `why` is for people."""
        ...


class DistGroup:
    """See `Group`. There is one in a process at a time, as torch has it."""

    def __init__(
        self,
        share: Share,
        store: Store | None = None,
        patience: timedelta = PATIENCE,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Joins the others where `store` is, else as torchrun's environment says. `lost` is told when someone
        does not answer, and may know who. Raises ConfigError where this process has a group already, RankLost
        where the others do not come."""
        check_vacant()
        self._share = share
        self._lost = lost
        self._broken: str | None = None
        self.num_totals = 0
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= share.size else "gloo"
        with self._watching(), _own_excepthook():
            dist.init_process_group(
                backend,
                init_method="env://" if store is None else None,
                store=store,
                rank=share.rank,
                world_size=share.size,
                timeout=JOINING,
            )
            self._passes = dist.new_group(backend=backend, timeout=patience)
            self._words = dist.new_group(backend="gloo", timeout=_FOREVER if share.rank else patience)
            self._meeting = dist.new_group(backend="gloo", timeout=_FOREVER)

    @property
    def share(self) -> Share:
        return self._share

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.total`."""
        x = x.contiguous()
        terms = [torch.empty_like(x) for _ in range(self._share.size)]
        with self._watching():
            self._exchange(x, terms)
        self.num_totals += 1
        out = terms[0].float()
        for term in terms[1:]:
            out = out + term.float()
        return out

    def _exchange(self, x: torch.Tensor, terms: list[torch.Tensor]) -> None:
        """Fill `terms` with every rank's `x`."""
        if x.is_cuda:
            dist.all_gather(terms, x, group=self._passes)
            return
        # With gloo one message from each to each takes a third of the time of its all_gather, for the few
        # kilobytes of a token. Bytes, whatever they mean: it need not know the dtype.
        mine = self._share.rank
        terms[mine] = x
        others = [rank for rank in range(self._share.size) if rank != mine]
        waits = [dist.irecv(terms[rank].view(torch.uint8), rank, group=self._passes) for rank in others]
        waits += [dist.isend(x.view(torch.uint8), rank, group=self._passes) for rank in others]
        for wait in waits:
            if wait is not None:
                wait.wait()

    def tell(self, message: bytes) -> None:
        """See `Group.tell`."""
        framed = len(message).to_bytes(_HEAD, "little") + message
        with self._watching():
            self._broadcast(framed[:FRAME].ljust(FRAME, b"\0"))
            if len(framed) > FRAME:
                self._broadcast(framed[FRAME:])

    def hear(self) -> bytes:
        """See `Group.hear`."""
        with self._watching():
            framed = self._broadcast(bytes(FRAME))
            length = int.from_bytes(framed[:_HEAD], "little")
            rest = length + _HEAD - FRAME
            if rest > 0:
                framed += self._broadcast(bytes(rest))
        return framed[_HEAD : _HEAD + length]

    def _broadcast(self, data: bytes) -> bytes:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(tensor, 0, group=self._words)
        return tensor.numpy().tobytes()

    def give(self, tensor: torch.Tensor, rank: int) -> None:
        """See `Group.give`."""
        if tensor.numel():
            with self._watching():
                dist.send(tensor.cpu().contiguous(), rank, group=self._passes)

    def take(self, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        """See `Group.take`."""
        taken = torch.empty(shape, dtype=torch.uint8)
        if taken.numel():
            with self._watching():
                dist.recv(taken, rank, group=self._passes)
        return taken

    def meet(self) -> None:
        """See `Group.meet`."""
        with self._watching():
            dist.barrier(group=self._meeting)

    def close(self, why: str) -> None:
        """See `Group.close`."""
        if self._broken is None:
            self._broken = why
            dist.destroy_process_group()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """What torch raises means that someone does not answer."""
        if self._broken is not None:
            raise RankLost(f"the model is no longer whole: {self._broken}")
        try:
            yield
        except RuntimeError as error:
            said = str(error).strip().splitlines()
            self.close(self._lost() or f"a rank does not answer ({said[0] if said else 'no reason given'})")
            raise RankLost(f"the model is no longer whole: {self._broken}") from error


def check_vacant() -> None:
    """Raises ConfigError where this process has a group already."""
    if dist.is_initialized():
        raise ConfigError("this process already has a model that is divided among ranks: end it first")


@contextmanager
def _own_excepthook() -> Iterator[None]:
    """torch puts one in its place that names the rank in every traceback of this process."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextmanager
def loopback() -> Iterator[None]:
    """Within it, connections between ranks are made on this machine's own interface alone."""
    name, mine = "GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo"
    before = os.environ.get(name)
    os.environ[name] = mine  # gloo asks for nothing else
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

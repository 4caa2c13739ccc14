"""The other ranks: each does to its own part of the model what rank 0 tells it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch

from engine.cache.memory import Memory
from engine.cache.memory import Plan as MemoryPlan
from engine.cache.table import build_memory
from engine.config import EngineConfig, probe_machine, resolve
from engine.errors import TenutoError
from engine.models.base import Model, Placement
from engine.models.table import build_model, context_length
from engine.parallel.followers import TCPStore, present
from engine.parallel.group import DistGroup, Group, loopback
from engine.parallel.messages import (
    Apply,
    Commit,
    Edit,
    End,
    Load,
    Plan,
    Restore,
    Rollback,
    Snapshot,
    decode,
)
from engine.parallel.share import Share
from engine.parallel.slices import Slices, local_needs
from engine.parallel.world import LOOPBACK, World
from engine.placing import run_pass
from engine.slots import memory_spec
from engine.state import PartKind, Point, Rows, SeqId, parts_of
from engine.weights.source import open_weights


class Follower:
    """One rank's part of a model, and of what is remembered."""

    def __init__(self, group: Group, model: Model, memory: Memory) -> None:
        self._group = group
        self._model = model
        self._memory = memory
        self._slices = Slices.of(memory.layout, model.needs, group.share.size)
        self._plan: MemoryPlan | None = None
        self._edits: Mapping[str, Callable[..., None]] = {
            "remove": memory.remove,
            "copy": memory.copy,
            "keep": memory.keep,
            "shift": memory.shift,
            "discard": memory.discard,
            "divide": memory.divide,
            "mark": memory.mark,
        }
        self._fills: Mapping[str, Callable[..., None]] = {
            "restore": memory.restore,
            "replace": memory.replace,
        }

    def do(self, message: Plan | Apply | Commit | Rollback | Edit | Snapshot | Restore) -> None:
        """What rank 0 has done, or is doing now."""
        match message:
            case Plan():
                self._plan = self._memory.plan(message.batch)
            case Apply():
                self._pass(message.index)
            case Commit():
                self._planned().commit()
            case Rollback():
                self._planned().rollback()
            case Edit():
                self._edits[message.verb](*message.arguments)
            case Snapshot():
                self._snapshot(message)
            case Restore():
                self._restore(message)

    def _planned(self) -> MemoryPlan:
        assert self._plan is not None, "a plan comes first"
        return self._plan

    def _pass(self, index: int) -> None:
        plan = self._planned()
        with torch.inference_mode():
            run_pass(self._model, None, plan.ubatches[index], plan.apply(index))

    def _snapshot(self, message: Snapshot) -> None:
        rows, _ = self._memory.snapshot(SeqId(message.seq), message.since)
        for run in rows:
            for spec, part in zip(parts_of(self._memory.layout, run.kind), run.parts, strict=True):
                if spec.name in self._slices.split:
                    self._group.give(part, 0)

    def _restore(self, message: Restore) -> None:
        def taken(kind: PartKind, start: int, stop: int) -> Rows:
            specs = parts_of(self._memory.layout, kind)
            shapes = ((spec.num_rows(start, stop), spec.row_nbytes) for spec in specs)
            return Rows(kind, start, stop, tuple(self._group.take(shape, 0) for shape in shapes))

        rows = tuple(taken(PartKind(kind), start, stop) for kind, start, stop in message.runs)
        specs = parts_of(self._memory.layout, PartKind.POINT)
        points = tuple(
            Point(at, tuple(self._group.take((spec.row_nbytes,), 0) for spec in specs))
            for at in message.points
        )
        tokens = tuple(np.frombuffer(message.tokens, np.int64).tolist())
        self._fills[message.verb](SeqId(message.seq), tokens, rows, points)


def load(group: Group, message: Load, local_rank: int) -> Follower:
    """This rank's part of the model that it is told of. Raises as `engine.loader.load_engine`."""
    share = group.share
    weights = open_weights(message.source)
    config = EngineConfig.from_mapping(message.config)
    resolved = resolve(config, context_length(weights), probe_machine())
    if resolved.device.index is not None:
        resolved = replace(resolved, device=torch.device("cuda", resolved.device.index + local_rank))
    torch.set_num_threads(resolved.threads)
    model = build_model(weights, Placement(resolved.dtype, resolved.device, resolved.n_ctx, group))
    spec = memory_spec(model.needs, resolved)
    memory = build_memory(replace(spec, needs=local_needs(spec.needs, share)))
    group.meet()
    return Follower(group, model, memory)


def follow(group: Group, local_rank: int) -> None:
    """Until rank 0 says that it is over. Raises RankLost when rank 0 is gone; whatever else is raised ends
    this rank, and so all of them."""
    follower: Follower | None = None
    while True:
        for message in decode(group.hear()):
            match message:
                case End():
                    return
                case Load():
                    follower = load(group, message, local_rank)
                case _:
                    assert follower is not None, "the model comes first"
                    follower.do(message)


def follow_torchrun(world: World) -> int:
    """A process that torchrun has started, of any rank but 0. Returns its exit code."""
    return _followed(lambda: DistGroup(Share(world.rank, world.size), None), world.local_rank)


def main(rank: int, size: int, port: int) -> NoReturn:
    """The life of a process that rank 0 of this machine has started and waits for at `port`."""

    def joined() -> Group:
        store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        store.set(present(rank), "")
        with loopback():
            return DistGroup(Share(rank, size), store)

    code = _followed(joined, local_rank=rank)
    sys.stderr.flush()
    os._exit(code)  # torch takes a second to put everything away


def _followed(join: Callable[[], Group], local_rank: int) -> int:
    """Errors that rank 0 has too are told there, and once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        group = join()
        try:
            follow(group, local_rank)
        finally:
            group.close("it is over")
    except TenutoError as error:
        return error.exit_code
    except Exception as error:
        print(f"tenuto: a rank, by a bug of ours, {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0

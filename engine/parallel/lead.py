"""Rank 0's hold on the others: it brings them together, tells them what to load, and lets them go."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from dataclasses import replace
from pathlib import Path

from engine.cache.memory import MemorySpec
from engine.cache.table import build_memory
from engine.config import EngineConfig
from engine.errors import ConfigError, RankLost
from engine.parallel.followers import Followers
from engine.parallel.group import DistGroup, Group, check_vacant, loopback
from engine.parallel.memory import ParallelMemory
from engine.parallel.messages import End, Load
from engine.parallel.share import Share
from engine.parallel.slices import local_needs
from engine.parallel.wire import Wire
from engine.parallel.world import World


class Lead:
    """`group` is what a model's layers see of the ranks; `followers` are their processes, if we started
    them."""

    def __init__(self, group: Group, followers: Followers | None = None) -> None:
        self.group = group
        self._wire = Wire(group)
        self._followers = followers
        # Also when no one ends it: where nothing refers to it any more, or this process ends.
        self._end = weakref.finalize(self, _let_go, self._wire, followers)

    @property
    def pids(self) -> dict[int, int]:
        """The process of each other rank that we started."""
        return {} if self._followers is None else self._followers.pids

    def load(self, source: str | Path, config: EngineConfig) -> None:
        """Let the others read their part of a model, while this rank reads its own. Raises RankLost."""
        # The others may have another working folder; what is no path here is a name that they know as well.
        path = Path(source).absolute()
        said = str(path) if path.exists() else str(source)
        self._wire.tell(Load(said, dataclasses.asdict(config)))
        self._wire.flush()

    def memory(self, spec: MemorySpec) -> ParallelMemory:
        """The memory of all ranks, when all are ready. Raises as `build_memory`, and RankLost."""
        local = build_memory(replace(spec, needs=local_needs(spec.needs, self.group.share)))
        self.group.meet()
        return ParallelMemory(local, spec.needs, self._wire)

    def end(self) -> None:
        """Let the others go; what is asked of them afterwards raises RankLost. Once is enough."""
        self._end()


def _let_go(wire: Wire, followers: Followers | None) -> None:
    with contextlib.suppress(RankLost):
        wire.tell(End())
        wire.flush()
    wire.group.close("its ranks were let go")
    if followers is not None:
        followers.end()


def lead(size: int, world: World | None) -> Lead:
    """Rank 0 of `size`: of those that torchrun has started in `world`, or else of processes of our own.
    Raises ConfigError where torchrun has started another number, RankLost where they do not come."""
    if world is None:
        check_vacant()
        followers = Followers(size)
        try:
            with loopback():
                return Lead(DistGroup(Share(0, size), followers.store, lost=followers.lost), followers)
        except BaseException:
            followers.kill()
            raise
    if world.size != size:
        raise ConfigError(f"tp = {size}: torchrun has started {world.size} ranks")
    return Lead(DistGroup(Share(0, size), None))

"""Where the ranks of one model meet: the four variables that torchrun sets for each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError

#: Only this machine can come in.
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class World:
    """Rank `rank` of `size` processes that meet at `address`:`port`, which rank 0 (or torchrun) opens.
    `local_rank` counts those of this machine alone."""

    rank: int
    size: int
    address: str
    port: int
    local_rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> World | None:
        """That which torchrun, or whoever starts processes as it does, has set; None where no one has.
        Raises ConfigError where it makes no sense."""
        if "WORLD_SIZE" not in environment or "RANK" not in environment:
            return None
        try:
            rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local_rank = int(environment.get("LOCAL_RANK", rank))
            address = environment["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"WORLD_SIZE and RANK are set, but MASTER_ADDR or MASTER_PORT: {error}"
            ) from error
        if not 0 <= rank < size:
            raise ConfigError(f"RANK = {rank}: there are WORLD_SIZE = {size} ranks, counted from 0")
        return cls(rank, size, address, port, local_rank)

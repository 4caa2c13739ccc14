"""When a write to Redis counts: once replicas have it, and while the server that took it has its place."""

from __future__ import annotations

from typing import Any

from engine.errors import StoreUnavailable
from sessions.stores.base import StoreConfig


class Replicas:
    """Of the servers that hold one tenant's keys."""

    def __init__(self, config: StoreConfig, key: str) -> None:
        """`key` is one of the tenant's, which is of no other use."""
        self._config = config
        self._key = key
        self._history: str | None = None

    def acknowledged(self, node: Any, what: str) -> bool:
        """Wait until replicas have all that was written before this. False where `node` is not, or no longer,
        what that was written to (a failover, or a restart): it may not have it, and must be asked again.
        Raises StoreUnavailable where too few replicas answer."""
        replication = node.info("replication")
        before, self._history = self._history, str(replication.get("master_replid"))
        if before not in (None, self._history):
            return False
        needed = self._config.replicas
        if needed is None:
            needed = min(1, int(replication.get("connected_slaves", 0)))
        if not needed:
            return True
        # WAIT speaks for its own connection's writes: a last one here comes after all that we wrote.
        pipe = node.pipeline(transaction=False)
        pipe.set(self._key, b"", px=60_000)
        pipe.execute_command("WAIT", needed, int(self._config.replica_timeout * 1000))
        acknowledged = int(pipe.execute()[-1])
        if acknowledged < needed:
            raise StoreUnavailable(
                f"{what} was written, but {acknowledged} of {needed} replicas have it after"
                f" {self._config.replica_timeout:.0f} s: a failover could lose it",
                outcome="unknown",
            )
        return True

"""How the HTTP service behaves: its limits, and whom it answers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """max_body      bytes of a request's body; of an archive that is imported, `max_import`
    max_imports   archives that are taken at once
    max_depth     how deep lists and objects may nest in a body
    max_requests  requests that are answered at once, streams among them; beyond them 429
    threads       threads for all that is not a turn (a turn has one of its own)
    requests_per_minute, tokens_per_minute  what one tenant may ask for, and have computed; None: any number
    patience      seconds until the next piece of a body must come, or that of an answer be taken
    keepalive     seconds without an event after which a stream says that it is alive
    retry_after   seconds, told to whom is refused for load and no better number is known
    operators     tenants who may see what the service counts of all; without API keys everyone may
    sweep         seconds between two sweeps of a tenant's store; None: nothing is collected here
    hosts         names that a request's Host may have beside those of the loopback, without API keys (with
                  keys any: a key is what a page of elsewhere has not)
    """

    max_body: int = 8 << 20
    max_import: int = 64 << 30
    max_imports: int = 4
    max_depth: int = 64
    max_requests: int = 512
    threads: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    patience: float = 60.0
    keepalive: float = 15.0
    retry_after: float = 1.0
    operators: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    sweep: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigError(f"service: {field.name} = {value} must be positive")

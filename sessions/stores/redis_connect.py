"""From a Redis address to a client, and from the client library's errors to ours.

redis://[USER:PASSWORD@]HOST:PORT/DB      rediss://…  (TLS)      unix:///PATH?db=0
redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/SERVICE[/DB]     rediss+sentinel://…
redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT                   rediss+cluster://…

With ?replicas=N (or &replicas=N) each write has to reach N replicas before it counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from engine.errors import IndexDamaged, StoreError, StoreFull, StoreUnavailable, UsageError
from sessions.stores.base import StoreConfig

PLAIN = ("redis", "rediss", "unix")
SENTINEL = ("redis+sentinel", "rediss+sentinel")
CLUSTER = ("redis+cluster", "rediss+cluster")

#: All that the client library raises on purpose; the second is no kind of the first.
CLIENT_ERRORS = (RedisError, RedisClusterException)

#: How a server refuses without the library's knowing it: the second, from within a script (before Redis 7).
_REFUSALS = ("NOAUTH", "user executing the script can't")

_PORT = 6379
_SENTINEL_PORT = 26379


def connect(url: str, config: StoreConfig) -> Any:
    """A client for `url` that repeats nothing by itself. Raises UsageError, StoreUnavailable."""
    # Retrying is ours: a swap must never be sent twice without its attempt's key.
    options: dict[str, Any] = {
        "socket_connect_timeout": config.connect_timeout,
        "socket_timeout": config.reply_timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    scheme = url.partition(":")[0]
    try:
        if scheme in PLAIN:
            _check_database(url)
            return redis.Redis.from_url(url, **options)
        if scheme.startswith("rediss"):
            options["ssl"] = True
        user, hosts, path = _split(url)
        options.update(user)
        if scheme in SENTINEL:
            return _sentinel(hosts, path, options)
        if path.strip("/"):
            raise UsageError("a Redis Cluster has no database number")
        node: Any = ClusterNode  # the library leaves these untyped
        nodes = [node(host, port) for host, port in _hosts(hosts, _PORT)]
        return RedisCluster(startup_nodes=nodes, **options)
    except ValueError as error:
        raise UsageError(f"not a Redis address: {error}") from error
    except CLIENT_ERRORS as error:
        raise redis_error(error) from error


def with_replicas(url: str, config: StoreConfig) -> tuple[str, StoreConfig]:
    """The address without its `replicas`, and the settings with them. Raises UsageError."""
    place, _, query = url.partition("?")
    parts = [part for part in query.split("&") if part]
    asked = [part.removeprefix("replicas=") for part in parts if part.startswith("replicas=")]
    if not asked:
        return url, config
    if len(asked) > 1 or not (asked[0].isascii() and asked[0].isdecimal()) or len(asked[0]) > 3:
        raise UsageError("a Redis address has one replicas=N, a number")
    rest = "&".join(part for part in parts if not part.startswith("replicas="))
    return f"{place}?{rest}" if rest else place, replace(config, replicas=int(asked[0]))


def _check_database(url: str) -> None:
    """The library takes database 0 for what is no number. Raises UsageError."""
    if url.startswith("unix:"):
        return
    number = _split(url)[2].partition("?")[0].strip("/")
    if number and not (number.isascii() and number.isdecimal()):
        raise UsageError(f"not a Redis address: {number!r} is no number of a database")


def _sentinel(hosts: str, path: str, options: dict[str, Any]) -> Any:
    service, _, number = path.strip("/").partition("/")
    if not service:
        raise UsageError("redis+sentinel:// needs the service's name after the hosts: …/SERVICE")
    timeouts = {key: options[key] for key in ("socket_connect_timeout", "socket_timeout", "retry")}
    maker: Any = Sentinel
    sentinel = maker(_hosts(hosts, _SENTINEL_PORT), sentinel_kwargs=timeouts, **options)
    return sentinel.master_for(service, db=int(number or 0))


def _split(url: str) -> tuple[dict[str, str], str, str]:
    """Credentials as options, hosts, and the path behind them."""
    place = url.partition("://")[2]
    authority, slash, path = place.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    if not at:
        return {}, hosts, slash + path
    user, _, password = credentials.partition(":")
    found = {"username": unquote(user), "password": unquote(password)}
    return {key: value for key, value in found.items() if value}, hosts, slash + path


def _hosts(hosts: str, port: int) -> list[tuple[str, int]]:
    found = []
    for each in hosts.split(","):
        host, _, number = each.rpartition(":") if ":" in each.rpartition("]")[2] else (each, "", "")
        host = host.strip("[]")
        if not host:
            raise UsageError("a Redis address names no host")
        found.append((host, int(number or port)))
    return found


def redis_error(error: RedisError | RedisClusterException) -> StoreError:
    """What an error of the client library means to the caller, in one line."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError) or any(
        refusal in text for refusal in _REFUSALS
    ):
        return StoreUnavailable(f"the Redis server refuses us: {text}", permanent=True)
    if "command not allowed when used memory" in text or "command not allowed under OOM" in text:
        return StoreFull("the Redis server has no memory left for this (maxmemory)")
    if "WRONGTYPE" in text:
        return IndexDamaged(
            "a key of ours in Redis holds another type of value; check --repair rebuilds the refs"
        )
    if "READONLY" in text:
        return StoreUnavailable("the Redis server is a read-only replica; give the address of its primary")
    if isinstance(error, RedisClusterException):
        return StoreUnavailable(f"the Redis Cluster cannot be reached: {text}")
    return StoreUnavailable(f"the Redis server cannot be used: {text}")

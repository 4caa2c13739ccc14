"""`tenuto serve`: conversations over HTTP."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from cli.app import App
from cli.keeping import Keeping, keeping_options
from cli.options import EngineOptions, engine_options, with_whole_store
from cli.retention import duration, retention_options
from cli.tracing import chosen_tracing
from engine.errors import UsageError

if TYPE_CHECKING:
    import socket

    from serialization.blobs import Store
    from sessions.keys import ApiKeys
    from sessions.service.config import ServiceConfig


@dataclass(frozen=True, slots=True)
class _Said:
    """What was said about the service itself."""

    service: ServiceConfig
    max_turns: int
    max_waiting: int
    drain: float
    patience: float
    lease: float
    retention: dict[str, object]
    keeping: Keeping


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any that is free."
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name, beside localhost, that clients may know this service by. May be repeated.",
)
@click.option(
    "--operator",
    "operators",
    multiple=True,
    metavar="TENANT",
    help="Where there are API keys: whose may read /metrics. May be repeated.",
)
@click.option(
    "--requests-per-minute", type=click.FloatRange(0, min_open=True), help="Of each tenant (any number)."
)
@click.option(
    "--tokens-per-minute",
    type=click.FloatRange(0, min_open=True),
    help="Read or said for each tenant (any number).",
)
@click.option(
    "--max-turns", type=click.IntRange(min=1), default=64, show_default=True, help="Turns that run at once."
)
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Turns that wait for one of those; more are refused (429).",
)
@click.option(
    "--drain",
    type=duration,
    default="30s",
    show_default=True,
    metavar="AGE",
    help="How long running turns may go on after SIGTERM before they are cut off and saved.",
)
@click.option(
    "--patience",
    type=duration,
    default="5s",
    show_default=True,
    metavar="AGE",
    help="How long a turn waits for another one in its session before it is refused (423).",
)
@click.option(
    "--lease",
    type=duration,
    default="30s",
    show_default=True,
    metavar="AGE",
    help="How long a session stays held after a process that talked in it died.",
)
@click.option(
    "--sequences", type=click.IntRange(min=1), default=16, show_default=True, help="In memory at once."
)
@click.option("--cells", type=click.IntRange(min=1), help="Tokens of all of them together (default: --ctx).")
@engine_options
@retention_options
@keeping_options
@with_whole_store
def serve(
    app: App,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    operators: tuple[str, ...],
    requests_per_minute: float | None,
    tokens_per_minute: float | None,
    max_turns: int,
    max_waiting: int,
    drain: float,
    patience: float,
    lease: float,
    sequences: int,
    cells: int | None,
    engine: EngineOptions,
    retention: dict[str, object],
    keeping: Keeping,
) -> None:
    """Serve conversations over HTTP: OpenAI's API, sessions of its own, llama-server's slots.

    It listens to this machine alone, unless there are API keys (`tenuto keys create`), which are then asked
    for. SIGTERM ends it once running turns have ended and are saved; a second one at once. One line of JSON a
    request goes to stderr (-q: none).
    """
    from sessions.keys import ApiKeys
    from sessions.service.address import Address
    from sessions.service.config import ServiceConfig

    address, keys = Address(host, port), ApiKeys(app.unlocking.folder)
    with_keys = bool(keys.list())
    if not with_keys and address.reaches_elsewhere():
        raise UsageError(f"others could reach {host}: that needs API keys (tenuto keys create)")
    settings: dict[str, object] = {"num_seqs": sequences}
    if cells is not None:
        settings["num_cells"] = cells
    model = replace(engine, config={**settings, **engine.config})
    config = ServiceConfig(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        operators=operators,
        hosts=hosts,
        sweep=keeping.sweep,
    )
    said = _Said(config, max_turns, max_waiting, drain, patience, lease, retention, keeping)
    with address.open() as listening:  # before minutes are spent on a model
        _serve(app, said, listening, keys if with_keys else None, model)


def _serve(
    app: App, said: _Said, listening: socket.socket, keys: ApiKeys | None, model: EngineOptions
) -> None:
    try:
        from sessions.service.app import build_app
        from sessions.service.server import serve
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not there: pip install 'tenuto[serve]'") from error
    from sessions.service.access import DEFAULT_TENANT
    from sessions.service.address import url_of
    from sessions.service.backend import Backend, BackendConfig
    from sessions.service.logs import Log
    from sessions.stores.open import open_store

    keyring, log = app.unlocking.keyring(), Log(None if app.out.quiet else sys.stderr)
    tracing = chosen_tracing(app.out)

    def store(tenant: str) -> Store:
        return open_store(app.url, tenant, keyring=keyring)

    def started() -> None:
        url = url_of(listening)
        if app.out.as_json:
            app.out.data(
                {"url": url, "model": backend.model.name, "store": app.address, "keys": keys is not None}
            )
        else:
            app.out.text(f"{backend.model.name} at {url}")
        sys.stdout.flush()

    policies = said.keeping.policies({"lease": said.lease, **said.retention})
    config = BackendConfig(
        said.max_turns,
        said.max_waiting,
        policies.everyone,
        policies.own,
        patience=said.patience,
        write_back=said.keeping.bounds(),
    )
    backend = Backend(app.engine(model), store, config)

    def tenants() -> list[str]:
        return [DEFAULT_TENANT] if keys is None else [key.tenant for key in keys.list()]

    try:
        service = build_app(backend, said.service, keys, log, tracing, tenants)
        serve(service, backend, listening, said.drain, log, started)
    finally:
        backend.close()
        tracing.close()

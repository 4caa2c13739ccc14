"""`tenuto stats`: what a store holds, and what takes the room."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cli.app import DEFAULT_TENANT, App
from cli.options import with_app
from cli.output import counted, moment, size
from cli.whose import known_tenants
from engine.errors import UsageError

if TYPE_CHECKING:
    from sessions.stats import Moment, StoreStats


@click.command()
@click.option(
    "--all-tenants",
    is_flag=True,
    help="Of each tenant: of those with an API key or keys to seal with, and of who needs neither.",
)
@with_app
def stats(app: App, all_tenants: bool) -> None:
    """Count what a store holds: sessions, turns, tokens, and every byte by class, sharing and age.

    Every manifest is read, one at a time, and every blob listed, so that it takes its time on a large store;
    memory it takes little of. Rows are not read. Changes nothing.
    """
    if all_tenants and app.tenant != DEFAULT_TENANT:
        raise UsageError("either --tenant or --all-tenants")
    names, unknown = known_tenants(app, app.url) if all_tenants else ([app.tenant], 0)
    found = {tenant: _count(app, tenant) for tenant in names}
    if app.out.as_json:
        tenants = [{"tenant": tenant, **_as_data(each)} for tenant, each in found.items()]
        app.out.data(
            {
                "store": app.address,
                "tenants": tenants,
                "unknown_tenants": unknown,
                "total_bytes": sum(each.total_bytes for each in found.values()),
            }
        )
        return
    for tenant, each in found.items():
        if all_tenants:
            app.out.text(f"tenant {tenant}")
        _tell(app, each)
        app.out.text()
    if unknown:
        app.out.warn(
            f"{counted(unknown, 'tenant')} more here, of which no key tells the name: say it with --tenant"
        )


def _count(app: App, tenant: str) -> StoreStats:
    from sessions.stats import count
    from sessions.stores.open import open_store

    with closing(open_store(app.url, tenant, keyring=app.unlocking.keyring())) as store:
        return count(store)


def _as_data(found: StoreStats) -> dict[str, Any]:
    data = asdict(found)
    return {**data, "sharing": found.sharing, "compression": found.compression}


def _tell(app: App, found: StoreStats) -> None:
    app.out.text(
        f"{counted(found.num_sessions, 'session')} ({counted(found.num_forks, 'fork')}),"
        f" {counted(found.num_pins, 'kept turn')}, {counted(found.num_turns, 'turn')},"
        f" {counted(found.num_tokens, 'token')}"
    )
    app.out.text(f"begun first: {_moment(found.oldest)}; saved last: {_moment(found.newest)}")
    app.out.text()
    rows = [
        [name, f"{each.num_blobs:,}", size(each.own), size(each.shared), size(each.unreferenced)]
        for name, each in found.classes.items()
    ]
    app.out.table(["CLASS", ">BLOBS", ">OF ONE SESSION", ">OF SEVERAL", ">OF NONE"], rows)
    app.out.text()
    ages = [
        [_age(name), f"{each.num_sessions:,}", f"{each.num_blobs:,}", size(each.nbytes)]
        for name, each in found.ages.items()
    ]
    app.out.table(["AGE", ">SESSIONS", ">BLOBS", ">BYTES"], ages)
    app.out.text()
    app.out.text(f"{size(found.total_bytes)} in all, {size(found.index_bytes)} of them index and refs")
    if found.sharing is not None and found.compression is not None:
        app.out.text(
            f"sharing: {size(found.logical_bytes)} of rows and states in {size(found.unique_bytes)},"
            f" {found.sharing:.2f}x; compression: {size(found.raw_bytes)} in these, {found.compression:.2f}x"
        )
    if found.num_missing:
        app.out.text(f"{counted(found.num_missing, 'blob')} needed and not there (check tells which)")
    if found.num_unreadable:
        app.out.warn(f"{counted(found.num_unreadable, 'manifest')} cannot be read (check tells which)")


def _moment(found: Moment | None) -> str:
    return "-" if found is None else f"{moment(found.at)}, session {found.session}"


def _age(name: str) -> str:
    return "older" if name == "older" else f"within a {name}".replace("a hour", "an hour")

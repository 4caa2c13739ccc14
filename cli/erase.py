"""`tenuto erase`: a tenant (or a session) goes, with every copy there is of it."""

from __future__ import annotations

import sys

import click

from cli.app import App
from cli.options import with_whole_store
from engine.errors import UsageError


@click.command()
@click.option("--tenant", metavar="TENANT", help="Who is erased.")
@click.option("--session", metavar="SESSION", help="Erase one session, where each has keys of its own.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@with_whole_store
def erase(app: App, tenant: str | None, session: str | None, yes: bool) -> None:
    """Destroy a tenant's keys, revoke its API keys, and delete what it has in this store.

    Where its store is sealed, nothing of it can be read from then on, from no tier and no backup of any
    store: the keys were never in one. Where it is not, backups are not covered.
    """
    if (tenant is None) == (session is None):
        raise UsageError("say who is erased: --tenant TENANT, or --session SESSION")
    if sys.stdin.isatty() and not yes:
        click.confirm(f"Erase {tenant or session} for ever?", abort=True, err=True)
    if tenant is not None:
        _erase_tenant(app, tenant)
    elif session is not None:
        _erase_session(app, session)


def _erase_tenant(app: App, tenant: str) -> None:
    from sessions.erase import erase_tenant
    from sessions.stores.open import opened_raw

    with opened_raw(app.url, tenant) as store:
        done = erase_tenant(store, app.unlocking.folder, tenant)
    if app.out.as_json:
        app.out.data({"tenant": tenant, "keys_destroyed": done.keys, "api_keys_revoked": done.api_keys})
        return
    app.out.note(f"deleted all that {tenant} had in this store; API keys revoked: {done.api_keys}")
    if done.keys:
        app.out.note("its keys are destroyed: no copy or backup of a store can be read any more")
    else:
        app.out.warn("it was not sealed: backups and other copies of the store are not covered")


def _erase_session(app: App, ref: str) -> None:
    from sessions.erase import erase_session

    ring = app.unlocking.keyring()
    if ring is None:
        raise UsageError("only a sealed store has keys that can be destroyed; `tenuto rm` deletes a session")
    manager = app.manager()
    session = erase_session(manager, ring.tenant(manager.tenant), ref)
    if app.out.as_json:
        app.out.data({"session": session, "keys_destroyed": True})
    else:
        app.out.note(f"session {session} is erased: no copy or backup of it can be read any more")

"""`tenuto keys`: who may come in, and what stores are sealed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.app import App
from cli.options import keys_options, with_output, with_whole_store
from cli.ordered import Ordered
from cli.output import Output, counted, moment
from cli.unlocking import Unlocking
from engine.errors import ProblemsFound, UsageError


@click.group(cls=Ordered)
def keys() -> None:
    """API keys of a service's tenants, and the keys that seal what they store."""


@keys.command()
@click.option("--tenant", metavar="TENANT", help="Whose key it is.")
@click.option(
    "--per-session",
    is_flag=True,
    help="Where a master key is given, and the tenant has no keys to seal with yet: one for each session, so"
    " that each can be erased by itself, and none shares stored rows with another.",
)
@click.option("--master", metavar="FILE", help="Make a master key in a new file, and nothing else.")
@keys_options
@with_output
def create(
    out: Output, unlocking: Unlocking, tenant: str | None, per_session: bool, master: str | None
) -> None:
    """Make an API key for a tenant, and print it: it is stored nowhere, and cannot be shown again.

    Where a master key is given the tenant also gets keys to seal with, if it has none; one that was erased
    begins anew.
    """
    if (tenant is None) == (master is None):
        raise UsageError("say whose key it is with --tenant, or where a master key is made with --master")
    if master is not None:
        _create_master(out, Path(master).expanduser())
    elif tenant is not None:
        _create_api_key(out, unlocking, tenant, per_session)


def _create_master(out: Output, path: Path) -> None:
    from sessions.keyring.master import make_master

    make_master(path)
    if out.as_json:
        out.data({"master": str(path)})
    out.note(f"made a master key in {path}; without it nothing can be opened that is sealed under it")


def _create_api_key(out: Output, unlocking: Unlocking, tenant: str, per_session: bool) -> None:
    from sessions.keyring.keyset import Scope
    from sessions.keys import ApiKeys

    ring = unlocking.keyring()
    if per_session and ring is None:
        raise UsageError("--per-session is about keys to seal with, and no master key was given")
    if ring is not None:
        sealing = ring.tenant(tenant)
        if sealing.renew(Scope.SESSION if per_session else Scope.TENANT):
            out.note(f"made keys to seal what {tenant} stores")
        elif per_session and sealing.scope is not Scope.SESSION:
            raise UsageError(f"{tenant} has keys already, and all its sessions share them")
    key, text = ApiKeys(unlocking.folder).create(tenant)
    if out.as_json:
        out.data({"id": key.id, "tenant": key.tenant, "created": key.created, "key": text})
    else:
        out.text(text)


@keys.command("list")
@keys_options
@with_output
def list_(out: Output, unlocking: Unlocking) -> None:
    """List the API keys, and whose stores are sealed. Keys themselves are never shown."""
    from sessions.keyring.master import MasterKeys
    from sessions.keyring.ring import Keyring
    from sessions.keys import ApiKeys

    api = ApiKeys(unlocking.folder).list()
    files = Keyring(unlocking.folder, MasterKeys()).files()
    if out.as_json:
        sealing: list[dict[str, Any]] = [
            {
                "tenant": file.of,
                "scope": file.scope.value,
                "created": file.created,
                "erased": file.erased,
                "master": file.wrapper.hex() if file.wrapper else None,
            }
            for file in files
        ]
        listed = [{"id": key.id, "tenant": key.tenant, "created": key.created} for key in api]
        out.data({"api_keys": listed, "sealing": sealing})
        return
    out.table(["API KEY", "TENANT", "SINCE"], [[key.id, key.tenant, moment(key.created)] for key in api])
    if files:
        out.text()
        rows = [
            [
                file.of,
                file.scope.value,
                moment(file.created),
                "erased " + moment(file.erased) if file.erased is not None else (file.wrapper or b"").hex(),
            ]
            for file in files
        ]
        out.table(["SEALED FOR", "A KEY FOR EACH", "SINCE", "MASTER KEY"], rows)


@keys.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@keys_options
@with_output
def revoke(out: Output, unlocking: Unlocking, ids: tuple[str, ...]) -> None:
    """Forget API keys, by the ids that `list` shows. A running service refuses them at once."""
    from sessions.keys import ApiKeys

    api = ApiKeys(unlocking.folder)
    revoked = [api.revoke(key_id).id for key_id in dict.fromkeys(ids)]
    if out.as_json:
        out.data({"revoked": revoked})
    else:
        out.note(f"revoked {counted(len(revoked), 'API key')}")


@keys.command()
@click.option("--tenant", metavar="TENANT", help="Whose stored data is sealed with a new key.")
@click.option("--master", is_flag=True, help="A new master key; stores are not touched.")
@click.option(
    "--drop-old",
    is_flag=True,
    help="Destroy the old keys after it. Copies that were made before cannot be read any more.",
)
@with_whole_store
def rotate(app: App, tenant: str | None, master: bool, drop_old: bool) -> None:
    """Put new keys in the place of old ones, while everything is used.

    With --tenant there is a new key for the tenant's data, and everything in the store is sealed with it.
    With --master every tenant's keys are wrapped by a new master key, which is put into the file of
    --master-key before the old one. Where the master key is in the environment, put the new one there
    yourself, before the old one.
    """
    if (tenant is None) != master:
        raise UsageError("say which keys: --tenant TENANT or --master")
    if tenant is not None:
        _rotate_tenant(app, tenant, drop_old)
    else:
        _rotate_master(app, drop_old)


def _rotate_tenant(app: App, tenant: str, drop_old: bool) -> None:
    from sessions.rotate import rotate as rotated
    from sessions.rotate import rotate_and_drop
    from sessions.stores.open import opened_sealed

    ring = app.unlocking.keyring()
    if ring is None:
        raise UsageError("this needs the master key: --master-key FILE, or TENUTO_MASTER_KEY")
    with opened_sealed(app.url, tenant, ring) as store:
        done = (rotate_and_drop if drop_old else rotated)(store, ring.tenant(tenant))
    if app.out.as_json:
        app.out.data({"blobs": done.num_blobs, "refs": done.num_refs, "problems": list(done.problems)})
    else:
        for problem in done.problems:
            app.out.text(problem)
        app.out.note(f"sealed {counted(done.num_blobs, 'blob')} and {counted(done.num_refs, 'ref')} anew")
    if done.problems:
        raise ProblemsFound("not everything could be sealed anew; `tenuto check` tells more")


def _rotate_master(app: App, drop_old: bool) -> None:
    from sessions.keyring.master import add_master, keep_newest
    from sessions.keyring.ring import Keyring

    path = app.unlocking.master_file
    masters = app.unlocking.masters() if path is None else add_master(path)
    wrapped = Keyring(app.unlocking.folder, masters).rewrap()
    if drop_old and path is not None:
        keep_newest(path)
    if app.out.as_json:
        app.out.data({"tenants": wrapped})
    else:
        app.out.note(f"wrapped the keys of {counted(wrapped, 'tenant')} anew")

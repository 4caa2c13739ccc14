"""`tenuto migrate`: from any place that keeps sessions to any other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from cli.app import DEFAULT_TENANT, App
from cli.files import replacing
from cli.foreign import ForeignSaid, foreign_options, words_of_export, words_of_import
from cli.moving import progress_bar, tell_moved, tell_plan
from cli.named_model import NamedModel
from cli.options import with_app
from cli.output import counted
from cli.reencoding import reencoding_options
from cli.retention import byte_size, quota_said
from cli.whose import known_tenants
from engine.errors import Drifted, ProblemsFound, UsageError

if TYPE_CHECKING:
    from sessions.keyring.ring import Keyring
    from sessions.migrate.endpoints import Endpoint
    from sessions.migrate.moved import Moved
    from sessions.migrate.reencoded import Reencoded
    from sessions.migrate.request import Request


@dataclass(frozen=True, slots=True)
class _Said:
    """What was said on the command line, but for the two ends and the model."""

    clash: str
    jobs: int
    force: bool
    clear: bool
    to_keys: str | None
    to_master_key: str | None
    budget: int | None
    newest: bool
    wanted: Mapping[str, Any]
    foreign: ForeignSaid


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and why; do nothing.")
@click.option(
    "--skip",
    "clash",
    flag_value="skip",
    help="Leave out what has something else in its place at DST.",
)
@click.option("--rename", "clash", flag_value="rename", help="Find it another name, or another id.")
@click.option("-f", "--force", is_flag=True, help="Overwrite DST, where it is a file.")
@click.option("--format", "newest", is_flag=True, help="Write all manifests in the newest format.")
@click.option("--clear", is_flag=True, help="DST lies in the clear, though a master key is given.")
@click.option("--to-keys", metavar="FOLDER", help="Where the keys of DST are, if not with those of SRC.")
@click.option("--to-master-key", metavar="FILE", help="Opens or seals DST, if another key than that of SRC.")
@click.option("--all-tenants", is_flag=True, help="Of a whole store: of each tenant whose name is known.")
@click.option(
    "--budget",
    type=byte_size,
    envvar="TENUTO_BUDGET",
    metavar="SIZE",
    help="Bytes that rows may take in DST; the sessions used longest ago give theirs up.",
)
@reencoding_options
@foreign_options
@click.option(
    "--verify",
    "count",
    type=click.IntRange(min=1),
    metavar="N",
    help="At DST, read the ids again with the model and compare what follows, at N lengths (of a whole store:"
    " of N sessions, at one each).",
)
@click.option(
    "-m",
    "--model",
    envvar="TENUTO_MODEL",
    metavar="MODEL",
    help="The model of the sessions, where"
    " one is needed: for other dtypes, foreign files, --verify.  [env: TENUTO_MODEL]",
)
@click.option("--threads", type=click.IntRange(min=1), envvar="TENUTO_THREADS", help="CPU threads of it.")
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=8, show_default=True, help="Sessions moved at once."
)
@with_app
def migrate(
    app: App,
    source: str,
    target: str,
    dry_run: bool,
    all_tenants: bool,
    clash: str | None,
    count: int | None,
    model: str | None,
    threads: int | None,
    **said: Any,
) -> None:
    """Move sessions from SRC to DST: a whole store, or one session between stores, archives and files.

    SRC and DST are each a STORE (a folder, redis://…; `store:` is the one in use), one session of it
    (STORE#SESSION, session:SESSION in the store in use; as SRC also STORE#SESSION@TURN and pin:NAME), an
    archive (FILE.tenuto, or - for stdin and stdout), or a file of another program. A new store is FOLDER/.

    SRC is only ever read. A whole store keeps its ids, names, kept turns and sharing, and is moved a session
    at a time; cut off, the same command goes on where it stopped. A session that cannot be read is told of,
    left out, and makes the exit code 58.
    """
    from sessions.migrate.endpoints import StoreEnd, source_of, target_of

    given = _Said(clash=clash or "refuse", **said)
    ends = source_of(source, app.url), target_of(target, app.url, given.foreign.format is not None)
    if not all_tenants:
        tenants, others = [app.tenant], _others(app, ends[0])
    else:
        if not isinstance(ends[0], StoreEnd) or app.tenant != DEFAULT_TENANT:
            raise UsageError("--all-tenants is of a whole store, and without --tenant")
        tenants, others = known_tenants(app, ends[0].url)
    if given.wanted.get("cut") is not None and isinstance(ends[0], StoreEnd):
        raise UsageError("--cut is of one session: STORE#SESSION")
    named = NamedModel(app, model, threads)
    requests = [_request(app, given, tenant, named, ends[1]) for tenant in tenants]
    if dry_run:
        _plan(app, ends, requests)
    else:
        done = _run(app, ends, requests)
        drifted = [] if count is None else _verify(app, ends, requests, done, count, named)
        _conclude(ends, done, drifted)
    if others:
        which = ", of which no key tells the name: say it with --tenant"
        app.out.warn(
            f"{counted(others, 'tenant')} more there{which if all_tenants else ': see --all-tenants'}"
        )


def _others(app: App, source: Endpoint) -> int:
    """How many tenants have something in a whole store, beside the only one that is moved where nobody was
    named."""
    from sessions.migrate.endpoints import StoreEnd

    if not isinstance(source, StoreEnd) or app.tenant != DEFAULT_TENANT:
        return 0
    known, others = known_tenants(app, source.url)
    return len(known) + others - (app.tenant in known)


def _reencoded(wanted: Mapping[str, Any], model: NamedModel) -> Reencoded:
    """The model is loaded here where it will be asked: sessions are carried by several threads, and none of
    them is this command's."""
    from serialization.reencode.reencoding import Reencoding
    from sessions.migrate.reencoded import Reencoded

    asked = wanted.keys() & {"type_k", "type_v"}
    return Reencoded(Reencoding(**wanted), model.opened({}).form if asked else None)


def _request(app: App, said: _Said, tenant: str, model: NamedModel, target: Endpoint) -> Request:
    from sessions.migrate.endpoints import ForeignEnd
    from sessions.migrate.foreign import Told
    from sessions.migrate.opening import Keys
    from sessions.migrate.request import Request
    from sessions.migrate.survey import Clash
    from sessions.policy import Policy

    wanted, types = dict(said.wanted), {}
    if isinstance(target, ForeignEnd):  # there they are what the other program's cache is of
        types = {name: wanted.pop(name) for name in ("type_k", "type_v") if name in wanted}
    told = Told(
        examined=lambda examined: app.out.note(words_of_import(examined)),
        exported=lambda exported: app.out.note(words_of_export(exported)),
    )
    return Request(
        reading=_reading,
        writing=lambda path: _writing(path, said.force),
        tenant=tenant,
        keys=Keys(app.unlocking.keyring(), _keyring_of_target(app, said), said.clear),
        policy=Policy.from_mapping({"quota": quota_said(), "budget": said.budget}),
        clash=Clash[said.clash.upper()],
        conversion=_reencoded(wanted, model) if wanted else None,
        newest=said.newest,
        jobs=said.jobs,
        foreign=said.foreign.files(model.opened, told, **types),
    )


def _keyring_of_target(app: App, said: _Said) -> Keyring | None:
    from sessions.keyring.master import MasterKeys
    from sessions.keyring.ring import Keyring

    folder = Path(said.to_keys).expanduser() if said.to_keys else app.unlocking.folder
    if said.to_master_key is not None:
        return Keyring(folder, MasterKeys.read(Path(said.to_master_key).expanduser()))
    masters = app.unlocking.masters()
    return Keyring(folder, masters) if masters else None


@contextmanager
def _reading(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdin.buffer
    else:
        with path.open("rb") as file:
            yield file


def _writing(path: Path | None, force: bool) -> AbstractContextManager[BinaryIO]:
    return _stdout() if path is None else replacing(path, force)


@contextmanager
def _stdout() -> Iterator[BinaryIO]:
    if sys.stdout.isatty():
        raise UsageError("an archive is no text for a terminal; name a file, or redirect the output")
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


# --- telling -----------------------------------------------------------------------------------


def _plan(app: App, ends: tuple[Endpoint, Endpoint], requests: list[Request]) -> None:
    from sessions.migrate.run import planned

    plans = []
    for request in requests:
        with planned(*ends, request) as migration:
            plans.append(migration.plan())
    if app.out.as_json:
        app.out.data([asdict(plan) for plan in plans] if len(plans) != 1 else asdict(plans[0]))
        return
    for plan in plans:
        tell_plan(app.out, plan, named=len(plans) > 1)


def _run(app: App, ends: tuple[Endpoint, Endpoint], requests: list[Request]) -> list[Moved]:
    from sessions.migrate.run import opened

    done: list[Moved] = []
    for request in requests:
        try:
            with opened(*ends, request) as migration, progress_bar(app.out) as told:
                done.append(migration.run(told))
        except KeyboardInterrupt:
            app.out.note("what was moved by now is whole; the same command goes on from there")
            raise
        if not app.out.as_json:
            tell_moved(app.out, done[-1])
        if request.conversion is not None and done[-1].before:
            app.out.warn("what was there already is as it was: it was not converted")
    if app.out.as_json and not _streams(ends[1]):
        app.out.data([asdict(each) for each in done] if len(done) != 1 else asdict(done[0]))
    return done


def _streams(end: Endpoint) -> bool:
    from sessions.migrate.endpoints import ArchiveEnd

    return isinstance(end, ArchiveEnd) and end.path is None


def _conclude(ends: tuple[Endpoint, Endpoint], done: list[Moved], drifted: list[str]) -> None:
    """Raises ProblemsFound, Drifted."""
    problems = sum(len(each.problems) for each in done)
    if problems:
        raise ProblemsFound(f"{counted(problems, 'session')} could not be moved; the rest is at {ends[1]}")
    if drifted:
        raise Drifted(f"logits have drifted: {', '.join(drifted)}")


def _verify(
    app: App,
    ends: tuple[Endpoint, Endpoint],
    requests: list[Request],
    done: list[Moved],
    count: int,
    model: NamedModel,
) -> list[str]:
    """Ask at the destination, and tell. Returns the sessions that have drifted."""
    from cli.verify import as_data, tell
    from sessions.migrate.verify import verified
    from sessions.policy import Policy

    told, drifted = [], []
    for request, moved in zip(requests, done, strict=True):
        for asked in verified(*ends, request, moved, count, Policy().drift, model.with_room):
            if asked.found is None:
                app.out.warn(f"session {asked.session} could not be asked: {asked.why}")
            elif app.out.as_json:
                told.append(as_data(asked.found))
            else:
                tell(app, asked.found)
            if asked.found is not None and asked.found.drifted:
                drifted.append(asked.session)
    if app.out.as_json and not _streams(ends[1]):
        app.out.data(told)
    return drifted

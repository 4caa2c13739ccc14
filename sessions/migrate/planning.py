"""From what was found in both stores to the plan of moving one to the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from engine.errors import StateError
from serialization.blobs import BlobClass, BlobId, Store, blob_class
from serialization.manifest import Manifest, ManifestKind
from sessions import names
from sessions.lease import LEASES
from sessions.migrate.carry import Conversion
from sessions.migrate.found import Item as Found
from sessions.migrate.journal import JOURNAL, Standing
from sessions.migrate.plan import Fate, Item, Plan
from sessions.migrate.survey import Clash, Survey
from sessions.policy import Policy
from sessions.uses import USES

_EXAMPLES = 5
#: So many manifests that nothing stands at are read, to tell older turns from deleted sessions.
_READ = 20_000
_PAGE = 256
_KNOWN = (names.SESSIONS, names.NAMES, names.PINS, names.PREFIXES, USES, LEASES, JOURNAL)
_THINGS = {
    "note": "notes of services",
    "salt": "salts (who shares with whom)",
    "draft": "states of drafters",
    "replies": "replies that may be asked for again",
}


def plan_of(
    source: Store,
    survey: Survey,
    ends: tuple[str, str],
    tenant: str,
    policy: Policy,
    clash: Clash,
    conversion: Conversion | None,
    pool: ThreadPoolExecutor,
) -> Plan:
    """Reads the survey and, in the source, manifests that no session stands at; where rows are converted,
    those of the sessions, too."""
    clashes = tuple(f"{item.ref} {item.why}" for item in survey.found.clashes())
    items = (
        *_kept(survey),
        *(() if conversion is None else _of_rows(source, survey, conversion, pool)),
        *_there(survey),
        *_refused(survey, clash),
        *_dropped(source, survey, pool),
        *_of_the_destination(survey, policy),
    )
    return Plan(
        *ends,
        tenant,
        tuple(item for item in items if item.count),
        survey.found.num_moving(names.SESSIONS),
        survey.found.needed_nbytes(),
        clashes if clash is Clash.REFUSE else (),
    )


def _kept(survey: Survey) -> Iterator[Item]:
    new = survey.found.num_moving(names.SESSIONS)
    yield Item(
        *(Fate.KEPT, "sessions", new, "with their ids, names, titles, turns, forks and times"),
        nbytes=survey.found.needed_nbytes(),
    )
    yield Item(Fate.KEPT, "kept turns", survey.found.num_moving(names.PINS), "under their names")
    for what, words in _THINGS.items():
        yield Item(Fate.KEPT, words, survey.found.num_things(what), "as they are")
    renamed = [item for item in survey.found.moving_elsewhere()]
    yield Item(
        *(
            Fate.CONVERTED,
            "sessions and kept turns",
            len(renamed),
            "under another name or id: theirs is taken",
        ),
        examples=tuple(
            f"{item.named or item.ref} as {item.name or item.place}" for item in renamed[:_EXAMPLES]
        ),
    )
    yield Item(Fate.RECOMPUTED, "index of known pasts", new, "from the token ids, as sessions are committed")


def _of_rows(
    source: Store, survey: Survey, conversion: Conversion, pool: ThreadPoolExecutor
) -> Iterator[Item]:
    """What becomes of the rows of all that is moved, added up; what is refused, with examples."""
    sums: dict[tuple[Fate, str, str], tuple[int, int]] = {}
    refused: list[str] = []
    moving = survey.found.moving()
    while page := list(islice(moving, _PAGE)):
        for found, items in zip(
            page, pool.map(lambda each: _planned(source, each, conversion), page), strict=True
        ):
            if why := next((item.why for item in items if item.fate is Fate.REFUSED), None):
                refused.append(f"{found.ref}: {why}")
                continue
            for item in items:
                count, nbytes = sums.get((item.fate, item.what, item.why), (0, 0))
                sums[item.fate, item.what, item.why] = count + item.count, nbytes + (item.nbytes or 0)
    for (fate, what, why), (count, nbytes) in sums.items():
        yield Item(fate, what, count, why, nbytes or None)
    why = "they cannot be made what is wanted, and are left out"
    yield Item(
        Fate.REFUSED, "sessions and kept turns", len(refused), why, examples=tuple(refused[:_EXAMPLES])
    )


def _planned(source: Store, found: Found, conversion: Conversion) -> tuple[Item, ...]:
    try:
        return conversion.plan(Manifest.decode(source.get(found.taken)))
    except StateError:
        return ()  # it went on since it was looked at


def _there(survey: Survey) -> Iterator[Item]:
    for stands, why in (
        (Standing.DONE, "an earlier run moved them, or they are the same"),
        (Standing.AHEAD, "they went on in the destination, and stay as they are there"),
    ):
        yield Item(Fate.THERE, "sessions and kept turns", survey.found.count(stands), why)


def _refused(survey: Survey, clash: Clash) -> Iterator[Item]:
    lost = list(survey.found.all(Standing.UNREADABLE))
    yield _told(Fate.REFUSED, lost, "they cannot be read in the source: `tenuto check` there tells more")
    if clash is not Clash.REFUSE:
        left = list(survey.found.clashes())
        yield _told(Fate.REFUSED, left, "something else is in their place, and --skip was said")
    gone = list(survey.found.all(Standing.GONE))
    yield _told(Fate.REFUSED, gone, "they were moved before, and deleted in the destination since")


def _told(fate: Fate, found: list[Found], why: str) -> Item:
    examples = tuple(f"{item.ref}: {item.why}" if item.why else item.ref for item in found[:_EXAMPLES])
    return Item(fate, "sessions and kept turns", len(found), why, examples=examples)


def _dropped(source: Store, survey: Survey, pool: ThreadPoolExecutor) -> Iterator[Item]:
    expired = list(survey.found.all(Standing.EXPIRED))
    yield _told(Fate.DROPPED, expired, "the source has lost them: their time was over, or it was restarted")
    if not survey.is_whole:
        return
    yield from _past(source, survey, pool)
    other = sum(not ref.startswith(_KNOWN) for ref, _ in source.list_refs(""))
    yield Item(Fate.DROPPED, "refs", other, "of kinds that this build does not know")
    yield Item(
        *(Fate.DROPPED, "sessions and kept turns", survey.num_left()),
        "they were moved before and are not in the source any more; they stay in the destination",
    )


def _past(source: Store, survey: Survey, pool: ThreadPoolExecutor) -> Iterator[Item]:
    """Manifests that no session stands at."""
    turns = tombs = unread = turns_nbytes = 0
    past = (
        (info.blob, info.nbytes)
        for info in source.list_blobs()
        if blob_class(info.blob) is BlobClass.MANIFEST and not survey.found.is_current(info.blob)
    )
    for page in _pages(islice(past, _READ)):
        kinds = pool.map(lambda each: _kind(source, each[0]), page)
        for (_, nbytes), kind in zip(page, kinds, strict=True):
            tombs += kind is ManifestKind.TOMBSTONE
            turns += kind in (ManifestKind.TURN, ManifestKind.PIN)
            turns_nbytes += nbytes if kind is ManifestKind.TURN else 0
            unread += kind is None
    rest = sum(1 for _ in past)
    yield Item(
        *(Fate.DROPPED, "older turns", turns),
        "nothing stands at them, and gc takes them in the source too",
        nbytes=turns_nbytes,
    )
    yield Item(
        Fate.DROPPED, "marks of deleted sessions", tombs, "what they keep from coming back is not moved"
    )
    yield Item(Fate.DROPPED, "manifests", unread, "nothing stands at them, and they cannot be read")
    yield Item(Fate.DROPPED, "older turns and marks of deleted sessions", rest, "too many to read for a plan")


def _kind(source: Store, blob: BlobId) -> ManifestKind | None:
    try:
        return Manifest.decode(source.get(blob)).kind
    except StateError:
        return None


def _of_the_destination(survey: Survey, policy: Policy) -> Iterator[Item]:
    if policy.budget is not None and survey.found.needed_nbytes() > policy.budget:
        yield Item(
            *(Fate.DROPPED, "rows of the sessions used longest ago", 1),
            f"rows may take {policy.budget:,} bytes in the destination: its next gc gives up the rest; ids"
            " and text stay",
        )


def _pages(found: Iterable[tuple[BlobId, int]]) -> Iterator[list[tuple[BlobId, int]]]:
    left = iter(found)
    while page := list(islice(left, _PAGE)):
        yield page

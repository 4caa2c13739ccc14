"""From a manifest and a wish to a plan: kept, converted, dropped, recomputed, refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.errors import ConfigError, FingerprintMismatch, NoCheckpoint, TenutoError
from engine.state import Fingerprint, PartKind, parts_of
from serialization.limits import MAX_CHUNKS, MAX_RAW_NBYTES, refuse_above
from serialization.manifest import Manifest
from serialization.reencode.forms import Forms
from serialization.reencode.items import items_of
from serialization.reencode.outline import nbytes_of
from serialization.reencode.plan import Conversion, Plan
from serialization.reencode.reencoding import Reencoding, Windows
from serialization.resume import cut, window_runs


def plan_reencoding(manifest: Manifest, wanted: Reencoding, forms: Forms | None = None) -> Plan:
    """What `reencode` would do. `forms` is of the model that made the state, for other dtypes.

    Only the manifest is looked at: that its blobs are there, and sound, shows when they are read.
    """
    refusals: list[TenutoError] = []
    source, conversion = manifest, None
    try:
        source = cut(manifest, manifest.length if wanted.cut is None else wanted.cut)
    except NoCheckpoint as error:
        refusals.append(error)
    try:
        conversion = _conversion(source, wanted, forms)
    except (ConfigError, FingerprintMismatch) as error:
        refusals.append(error)
    if conversion is not None and source.draft is not None:
        source = replace(source, draft=None)
    plan = Plan(source, wanted, conversion, (), ())
    refusals += _too_large(plan)
    refusals += _not_full(plan)
    return replace(plan, items=tuple(items_of(manifest, plan, refusals)), refusals=tuple(refusals))


def _conversion(source: Manifest, wanted: Reencoding, forms: Forms | None) -> Conversion | None:
    """None where all rows stay of the dtypes that they are of."""
    meaning = source.fingerprint.meaning
    stored = {name: meaning.get(name) for name in ("type_k", "type_v")}
    asked = {"type_k": wanted.type_k, "type_v": wanted.type_v}
    changed = {
        name: dtype
        for name, dtype in asked.items()
        if stored[name] is not None and dtype not in (None, stored[name])
    }
    if not changed or (forms is None and not source.tokens):
        return None
    if forms is None:
        raise ConfigError(
            "rows of another dtype need the model that made them: it says which are rotated, and how"
        )
    # a field that the model has no rows of is not in its meaning, and any dtype will do
    type_k, type_v = (str(stored[name] or "f32") for name in ("type_k", "type_v"))
    before = forms(type_k, type_v)
    for field, theirs, mine in source.fingerprint.differing(Fingerprint(before.meaning)):
        raise FingerprintMismatch(
            f"the state was made with {field} = {theirs}, this model has {mine}", field=field
        )
    if before.layout != source.layout:
        raise FingerprintMismatch("the state was made with another cache layout", field="layout")
    return Conversion(before, forms(changed.get("type_k") or type_k, changed.get("type_v") or type_v))


def _too_large(plan: Plan) -> Iterator[TenutoError]:
    """LimitExceeded where chunks would be too many, or a blob too large."""
    try:
        refuse_above("chunks", len(plan.outline(plan.source).starts()), MAX_CHUNKS)
        for piece in plan.outline(plan.source).pieces():
            refuse_above("rows of one blob, in bytes", nbytes_of(plan.layout, piece), MAX_RAW_NBYTES)
    except TenutoError as error:
        yield error


def _not_full(plan: Plan) -> Iterator[TenutoError]:
    """Where all window rows are wanted, and some were dropped."""
    source = plan.source
    if plan.wanted.windows is not Windows.FULL or not parts_of(source.layout, PartKind.WINDOW):
        return
    runs = [
        (start, min(stop, source.length))
        for start, stop in window_runs(source.chunks)
        if start < source.length
    ]
    if source.length and runs != [(0, source.length)]:
        had = ", ".join(f"[{start:,}, {stop:,})" for start, stop in runs) or "none"
        yield NoCheckpoint(
            f"the window rows of {had} of {source.length:,} tokens are stored; the others are to be had only "
            "by reading the tokens again",
            stored=runs,
        )
